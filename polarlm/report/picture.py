"""A picture of the page for a README: taken by a headless Chromium, small."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from polarlm.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WINDOW = (1440, 1920)  # table, verdicts, learning curves and radial growth
SCALE = 0.7
COLOURS = 128  # a palette makes the file four times smaller and nobody sees it


def write_picture(page: Path, out: Path) -> Path:
    """Photograph the top of a report."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError(
            f"--picture needs a browser and found none of {', '.join(BROWSERS)}; try apt-get install chromium"
        )
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        options += [f"--window-size={WINDOW[0]},{WINDOW[1]}", "--virtual-time-budget=10000", f"--screenshot={shot}"]
        done = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=300)
        if not shot.exists():
            raise UserError(f"{browser} made no picture of {page}: {done.stderr.strip().splitlines()[-1:]}")
        image = Image.open(shot).convert("RGB")
        image = image.resize((round(image.width * SCALE), round(image.height * SCALE)), Image.Resampling.LANCZOS)
        out.parent.mkdir(parents=True, exist_ok=True)
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)
    return out
