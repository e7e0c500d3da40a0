"""Every picture of the docs by one command: `make pictures`, or python -m tools.pictures [name …].

A PNG carries its date, the command and a hash of what it shows (rows or code); a test fails when that has changed.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REPORT_HEIGHT = 800  # the page's headline, forest plot, table and verdicts


@dataclass(frozen=True)
class Picture:
    """One or more PNG files, how they are drawn, and the files whose change makes them old."""

    files: tuple[str, ...]
    draw: Callable[[], None]
    sources: tuple[str, ...]


def draw_report() -> None:
    """docs/report.png: the report page of question 1's runs on Tiny Shakespeare, from their committed rows."""
    from PIL import Image

    from polarlm.report.page import write_page
    from polarlm.report.payload import VALIDATED, build_payload
    from polarlm.report.pictures import write_picture
    from polarlm.verdict.judgement import judge_groups
    from study.judge import chosen_value, labelled, seed_rows
    from study.summaries import as_run, read_summary

    summary, part, groups = read_summary(DOCS / "study", "baselines"), "characters", []
    for variant in ("standard_strong", "xsa_strong", "polar_paper", "xsa_forgetting", "polar"):
        rate = chosen_value(summary, part, variant)
        settings = {**summary.settings[part, variant], "optim.lr": rate}
        runs = [as_run(row, settings, "val/bits_per_byte") for row in seed_rows(summary, part, variant, rate)]
        for run in runs:  # rows keep the curve of the metric that decides
            for name in (*VALIDATED, "train/loss", "train/lr", "train/grad_norm"):
                run.metrics.columns.setdefault(name, np.full(len(run.metrics.columns["step"]), np.nan))
        groups.append(labelled(variant, runs))
    judgement = judge_groups(groups, "val/bits_per_byte", "standard_strong", margin=0.005, planned_seeds=5)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page(groups, judgement, build_payload(groups, judgement, page, None), page)
        write_picture(page, DOCS / "report.png")
    image = Image.open(DOCS / "report.png")
    image.crop((0, 0, image.width, REPORT_HEIGHT)).save(DOCS / "report.png", optimize=True)


def draw_filter() -> None:
    """docs/rt_filter.png: the filter without a network."""
    from polarlm.geometry.example import main

    main(str(DOCS / "rt_filter.png"))


def draw_paper() -> None:
    """docs/figures/*.png: the paper's figures from polarlm.geometry."""
    from tools.figures import main

    main(str(DOCS / "figures"))


PICTURES = {
    "report": Picture(("report.png",), draw_report, ("docs/study/baselines.json",)),
    "rt_filter": Picture(("rt_filter.png",), draw_filter, ("polarlm/geometry/example.py",)),
    "paper": Picture(
        tuple(f"figures/{name}.png" for name in ("model", "filter", "covariance", "update")),
        draw_paper,
        ("tools/figures.py",),
    ),
}


def source_hash(sources: Sequence[str]) -> str:
    """A short hash of the files that a picture shows."""
    digest = hashlib.sha256()
    for name in sources:
        digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def stamp(path: Path, command: str, sources: Sequence[str]) -> None:
    """Write date, command and sources into a PNG."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Date", datetime.datetime.now(datetime.timezone.utc).date().isoformat())
    info.add_text("Command", command)
    info.add_text("Sources", f"{source_hash(sources)} {' '.join(sources)}")
    image = Image.open(path)
    image.load()
    image.save(path, optimize=True, pnginfo=info)


def main(*names: str) -> None:
    """Draw the named pictures, or all, those of the study included."""
    for name in names or PICTURES:
        picture = PICTURES[name]
        picture.draw()
        for file in picture.files:
            stamp(DOCS / file, f"python -m tools.pictures {name}", picture.sources)
            print(f"docs/{file}")
    if not names:
        from study.results import write

        for path in write(DOCS / "study", DOCS / "results.md"):
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(*sys.argv[1:])
