"""Pictures of the page and of its figures: drawn by the page itself in a headless Chromium, light, at print size."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from polarlm.errors import UserError

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
