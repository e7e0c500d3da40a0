"""Pictures in files: summary.png of a run, and the figures of a report, drawn at print size by a headless Chromium."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

from polarlm.data.atomic import explained, replacing
from polarlm.errors import UserError
from polarlm.evaluation.metrics import BY_NAME
from polarlm.runs.reading import Run, read_run

INK, ACCENT, FAINT = "#24292f", "#0072B2", "#9aa4ae"
DPI = 150


def write_summary_png(run_folder: str | Path) -> Path:
    """Draw loss and, where the run was probed, the residual stream's magnitude by layer; returns the picture's path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    run = read_run(Path(run_folder))
    rms = {p.tokens: p.values["radial/residual_rms"] for p in run.probes if "radial/residual_rms" in p.values}
    figure = Figure(figsize=(10.5 if rms else 5.6, 3.8), layout="constrained")
    FigureCanvasAgg(figure)  # no display and no global state: training may draw from any thread
    axes = figure.subplots(1, 2 if rms else 1, squeeze=False)[0]
    _draw_loss(axes[0], run)
    axes[0].xaxis.set_major_formatter(EngFormatter())
    if rms:
        _draw_radial_growth(axes[1], rms)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=8)
        axis.grid(alpha=0.25, linewidth=0.6)
    # parse_math=False: a run's name is text, whatever characters it has.
    figure.suptitle(f"{run.name} ({run.block}, seed {run.seed})", fontsize=10, color=INK, parse_math=False)
    path = Path(run_folder) / "summary.png"
    beside = path.with_name(".summary.png.tmp")
    with explained(path), replacing(path, beside):
        figure.savefig(beside, dpi=DPI, format="png")
    return path


def _draw_loss(axis, run: Run) -> None:
    train, val = run.metrics.stream("train/loss"), run.metrics.stream("val/loss")
    if len(train["step"]):
        axis.plot(train["tokens"], train["train/loss"], color=FAINT, linewidth=1, label="training")
    if len(val["step"]):
        axis.plot(val["tokens"], val["val/loss"], color=ACCENT, marker="o", markersize=3, label="validation")
    final = run.number("val/loss")
    if final is None:
        title = "No validation yet" if run.status != "failed" else "Failed before a validation"
    else:
        others = [BY_NAME["perplexity"], BY_NAME["bits_per_byte"]]
        words = [f"{m.title} {value:.4g}" for m in others if (value := run.number(f"val/{m.name}"))]
        title = f"Validation loss {final:.4g}" + (f" ({', '.join(words)})" if words else "")
    axis.set_title(title, loc="left", fontsize=9, color=INK)
    axis.set_xlabel("training tokens", fontsize=8)
    axis.set_ylabel(f"loss ({BY_NAME['loss'].unit})", fontsize=8)
    # The first steps fall from log V: without this cut the rest of the run is a flat line.
    losses = np.concatenate([train["train/loss"], val["val/loss"]])
    losses = losses[np.isfinite(losses)]
    if len(losses) > 20:
        low, high = losses.min(), np.quantile(losses, 0.97)
        axis.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.15 * (high - low) + 1e-6)
    if len(train["step"]) or len(val["step"]):
        axis.legend(frameon=False, fontsize=8)


def _draw_radial_growth(axis, rms: dict[float, np.ndarray]) -> None:
    moments = sorted(rms)
    for index, tokens in enumerate(moments):
        newest = index == len(moments) - 1
        progress = (index + 1) / len(moments)
        axis.plot(
            np.arange(len(rms[tokens])),
            rms[tokens],
            color=ACCENT if newest else FAINT,
            alpha=1 if newest else 0.25 + 0.5 * progress,
            linewidth=1.8 if newest else 0.9,
            marker="o" if newest else None,
            markersize=3.5,
            label="end of training" if newest else ("earlier probes" if index == 0 else None),
        )
    last = rms[moments[-1]]
    # Embeddings are small by their initialisation, and the first layer makes up for that: two factors, not one.
    first = last[1] / last[0] if last[0] else np.nan
    then = last[-1] / last[1] if last[1] else np.nan
    title = f"The residual stream grows {first:.3g}× to layer 1, then {then:.3g}× to the last"
    axis.set_title(title, loc="left", fontsize=9, color=INK)
    axis.set_xlabel("after layer (0 = embedding)", fontsize=8)
    axis.set_ylabel("residual RMS", fontsize=8)
    axis.set_xticks(np.arange(len(last))[:: max(1, len(last) // 12)])
    axis.legend(frameon=False, fontsize=8)


# -- figures of a page, drawn by a headless browser --

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000")
WINDOW = (1440, 1920)  # table, verdicts, learning curves and radial growth
SCALE = 0.7
OF_THE_VERDICT = ("forest", "response", "waterfall", "value")
PRINTED = re.compile(r'<script type="application/json" id="printed">(.*?)</script>', re.DOTALL)


def write_picture(page: Path, out: Path, figure: str | None = None) -> Path:
    """Write the top of a report (PNG, PDF) or one figure of it (also SVG) into `out`; its suffix chooses the format."""
    kind = out.suffix[1:]
    if figure is not None:
        (made,) = _printed(page, figure, kind, titled=True)
        _write(out, made)
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pdf":
        _browse(page.as_uri(), "--no-pdf-header-footer", f"--print-to-pdf={out.absolute()}")
        return out
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        _browse(page.as_uri(), f"--window-size={WINDOW[0]},{WINDOW[1]}", f"--screenshot={shot}")
        image = Image.open(shot).convert("RGB")
        image = image.resize((round(image.width * SCALE), round(image.height * SCALE)), Image.Resampling.LANCZOS)
        image.save(out, optimize=True)  # without a palette: in 128 colours two groups had the same one
    return out


def write_figures(page: Path, folder: Path, kind: str, judged: str, trained: str) -> list[Path]:
    """Write every figure of a report at print size, and captions.txt with what each shows.

    A figure of the verdict has the protocol of the comparison in its caption, the others the settings of the runs.
    """
    files, captions = [], []
    for made in _printed(page, "all", kind, titled=False):
        files.append(folder / f"{re.sub(r'[^a-z0-9]+', '-', made['name'].lower()).strip('-')}.{kind}")
        _write(files[-1], made)
        measured = judged if made["name"] in OF_THE_VERDICT else trained
        captions.append(f"{files[-1].name}\n{made['title']}. {made['note']} {measured}\n")
    files.append(folder / "captions.txt")
    files[-1].write_text("\n".join(captions), encoding="utf-8")
    return files


def _printed(page: Path, figure: str, kind: str, *, titled: bool) -> list[dict]:
    """What the page draws for `#print=…`: name, title, note, size, and the picture as SVG text or PNG in base64."""
    wanted = {"print": figure, "format": "png" if kind == "png" else "svg", "titled": int(titled)}
    answered = PRINTED.search(_browse(f"{page.as_uri()}#{urlencode(wanted)}", "--dump-dom"))
    if answered is None:
        raise UserError(f"{page}: the browser drew no figures. Write the page again with this version of polarlm.")
    answer = json.loads(answered[1])
    if not answer["figures"]:
        raise UserError(f"--figure {figure} does not exist on this page. Choices: {', '.join(answer['names'])}, all")
    return answer["figures"]


def _write(out: Path, made: dict) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".png":
        out.write_bytes(base64.b64decode(made["data"]))
    elif out.suffix == ".svg":
        out.write_text(made["data"], encoding="utf-8")
    else:
        size = f"@page {{ size: {made['width']}px {made['height']}px; margin: 0 }}"
        with tempfile.TemporaryDirectory() as folder:
            sheet = Path(folder) / "figure.html"
            sheet.write_text(
                f"<meta charset=utf-8><style>{size} body {{ margin: 0 }}</style>{made['data']}",
                encoding="utf-8",
            )
            _browse(sheet.as_uri(), "--no-pdf-header-footer", f"--print-to-pdf={out.absolute()}")


def _browse(address: str, *options: str) -> str:
    """Open an address in a headless browser; returns what it prints."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError(
            f"Pictures need a browser, and none of {', '.join(BROWSERS)} is installed. Try: apt-get install chromium"
        )
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", *options, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise UserError(f"{browser} failed: {''.join(done.stderr.strip().splitlines()[-1:])}")
    return done.stdout
