"""What a person sees while training: the time left is there on every terminal."""

from types import SimpleNamespace

import pytest

from polarlm.printing import clock, short
from polarlm.training.loggers.progress import Progress, bar_width, fitting_parts

LAST = {"train/loss": 12.345, "train/lr": 3e-4, "tokens_per_second": 123456.0, "mfu": 0.42, "val/loss": 11.987}


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_time_left_is_visible_at_any_width(columns):
    import io

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    progress = Progress(SimpleNamespace(last=LAST), batch_tokens=1024)
    out = io.StringIO()
    progress.console = Console(file=out, width=columns, force_terminal=True, color_system=None)
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=bar_width(columns)),
        TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
        console=progress.console,
    )
    bar.add_task("train", total=120000, completed=60000, text=progress._bar_text(60000, 120000))
    progress.console.print(bar.get_renderable())
    line = out.getvalue().splitlines()[0]
    assert "left" in line and "…" not in line and len(out.getvalue().splitlines()) == 1
    if columns >= 80:
        assert "loss 12.345" in line
    if columns >= 200:
        assert "lr 3.0e-04" in line and "tok/s" in line and "mfu 42%" in line


def test_what_is_needed_least_goes_first():
    parts = {
        "tokens": "1M tokens",
        "loss": "loss 1",
        "lr": "lr 1",
        "speed": "5 tok/s",
        "val": "val 2",
        "left": "left 9",
    }
    assert fitting_parts(parts, None) == "1M tokens  loss 1  lr 1  5 tok/s  val 2  left 9"
    assert fitting_parts(parts, 24) == "loss 1  val 2  left 9"
    assert fitting_parts(parts, 1) == "left 9"


def test_times_and_large_numbers_are_short():
    assert [clock(s) for s in (0.4, 59.6, 75, 3723, float("nan"))] == ["0:00", "1:00", "1:15", "1:02:03", "–"]
    assert [short(n) for n in (999, 1234, 1_234_567, 2.5e12)] == ["999", "1.2k", "1.2M", "2.5T"]
