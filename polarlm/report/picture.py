"""A picture of the page, or of one of its figures, for a README: taken by a headless Chromium, small."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polarlm.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WINDOW = (1440, 1920)  # table, verdicts, learning curves and radial growth
SCALE = 0.7
FIGURE_WINDOW = (860, 1000)  # one figure alone; what is empty is cut off
BORDER = 10
COLOURS = 128  # a palette makes the file four times smaller and nobody sees it


def write_picture(page: Path, out: Path, figure: str | None = None) -> Path:
    """Photograph the top of a report, or one figure of it (forest, waterfall, bits, …; eval.py's: length, …)."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError(
            f"--picture needs a browser and found none of {', '.join(BROWSERS)}; try apt-get install chromium"
        )
    from PIL import Image

    window = FIGURE_WINDOW if figure else WINDOW
    address = page.as_uri() + (f"#figure={quote(figure)}" if figure else "")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        options += [f"--window-size={window[0]},{window[1]}", "--virtual-time-budget=10000", f"--screenshot={shot}"]
        done = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=300)
        if not shot.exists():
            raise UserError(f"{browser} made no picture of {page}: {done.stderr.strip().splitlines()[-1:]}")
        image = Image.open(shot).convert("RGB")
        if figure:
            image = _without_empty_edges(image, figure)
        else:
            image = image.resize((round(image.width * SCALE), round(image.height * SCALE)), Image.Resampling.LANCZOS)
        out.parent.mkdir(parents=True, exist_ok=True)
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)
    return out


def _without_empty_edges(image: Any, figure: str) -> Any:
    from PIL import Image, ImageChops

    box = ImageChops.difference(image, Image.new("RGB", image.size, image.getpixel((0, 0)))).getbbox()
    if box is None:
        raise UserError(f"--figure {figure}: this page has no such figure, or nothing to draw in it")
    left, top, right, bottom = box
    return image.crop(
        (
            max(0, left - BORDER),
            max(0, top - BORDER),
            min(image.width, right + BORDER),
            min(image.height, bottom + BORDER),
        )
    )
