import pytest

from polarlm.errors import UserError
from polarlm.runs.files import json_lines
from polarlm.training.recorder import JsonLines, RowLogger


def test_rewinding_metrics_drops_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"st')
    lines = JsonLines(path)
    lines.rewind(20)
    assert [row["step"] for row in json_lines(lines.path)] == [10, 20]


def test_infinite_losses_are_written_as_null_so_that_every_line_is_json(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1, "train/loss": float("nan")})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert json_lines(lines.path) == [{"step": 1, "train/loss": None}]


def test_damaged_rows_are_left_out_and_told(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[3]\n{"x": 1}\n{"step": "a"}\n{"step": 2}\n{"st')
    lines = JsonLines(path)
    assert [row.get("step") for row in json_lines(lines.path)] == [
        1,
        None,
        "a",
        2,
    ]  # also when nothing is left to train
    lines.rewind(20)
    assert [row["step"] for row in json_lines(lines.path)] == [1, 2]
    assert "4 damaged lines are left out" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_row_that_does_not_fit_on_the_disk_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"disk is full.*metrics\.jsonl"):
        JsonLines(tmp_path / "metrics.jsonl").append({"step": 1})


def test_what_callbacks_log_joins_the_next_row_and_makes_none_of_its_own():
    logger = RowLogger()
    logger.log_metrics({"lr-AdamW": 0.1, "epoch": 0}, step=3)
    logger.log_metrics({"load": 2}, step=4)
    assert logger.take() == {"lr-AdamW": 0.1, "load": 2.0}
    assert logger.take() == {}
