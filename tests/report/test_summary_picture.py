"""summary.png is drawn for every run, probed or not, whatever its name or fate."""

import pytest

from polarlm.report.pictures import write_summary_png
from tests.synthetic_runs import write_run


@pytest.mark.parametrize(
    "options",
    [
        {"block": "polar"},
        {"diagnostics": False, "name": "a <b> $x_1 & \\frac"},
        {"diverged": True, "diagnostics": False},
        {"status": None, "steps": 20, "diagnostics": False},
    ],
    ids=["probed", "odd name", "diverged", "killed early"],
)
def test_a_picture_is_written(tmp_path, options):
    folder = write_run(tmp_path / "run", **options)
    path = write_summary_png(folder)
    assert path == folder / "summary.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    assert not list(folder.glob(".*"))


def test_probed_runs_get_the_second_panel(tmp_path):
    from PIL import Image

    with_probe = Image.open(write_summary_png(write_run(tmp_path / "a"))).size
    without = Image.open(write_summary_png(write_run(tmp_path / "b", diagnostics=False))).size
    assert with_probe[0] > 1.5 * without[0]


def test_an_empty_folder_still_gives_a_picture(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert write_summary_png(tmp_path).exists()
