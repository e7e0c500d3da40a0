"""The worked example of docs/extending.md: a metric is one row of one table, and then it is everywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, TINY
from tests.training.loggers.offline_wandb import read_offline_run

EXAMPLE = re.search(r"### A metric\n.*?```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
DRIVER = """
import sys
import polarlm.evaluation.metrics as table
new, = eval("[" + {row!r} + "]", vars(table))
table.METRICS = (*table.METRICS, new)
table.BY_NAME[new.name] = new
from polarlm.launch import entry
from polarlm import cli
name, *arguments = sys.argv[1:]
sys.exit({{"train": entry.train, "eval": entry.evaluate, "cli": cli.main}}[name](arguments))
"""


@pytest.mark.slow
def test_a_row_of_the_table_reaches_validation_eval_table_wandb_report_and_csv(tmp_path: Path):
    assert EXAMPLE is not None
    (tmp_path / "driver.py").write_text(DRIVER.format(row=EXAMPLE[1].strip()))
    (tmp_path / "text.txt").write_text("".join(f"{n * n % 97} lamps were lit.\n\n" for n in range(900)))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "driver.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=400,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
            | {"WANDB_MODE": "offline"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    small = [*TINY, "trainer.max_steps=6", "logger=wandb", "cache_dir=cache"]
    output = run("train", "data=text", "data.path=text.txt", *small, "name=a")
    assert "bits/char" in output
    folder = tmp_path / "runs" / "a"
    summary = json.loads((folder / "summary.json").read_text())
    value = summary["val/bits_per_character"]
    assert value == pytest.approx(summary["val/bits_per_byte"], rel=1e-9)  # this text is ASCII
    assert summary["baselines"]["bigram"]["bits_per_character"] > 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val/bits_per_character"] == value
    (recorded,) = (folder / "wandb").glob("offline-run-*")
    assert read_offline_run(recorded).summary["final/val/bits_per_character"] == value
    assert f"bits per character {value:.4f}" in run("eval", "checkpoint=runs/a", "cache_dir=cache")
    (record,) = [json.loads(p.read_text()) for p in (folder / "evaluations").glob("windows-*.json")]
    assert record["metrics"]["bits_per_character"] == value
    run("cli", "compare", "runs/a", "--out", "report.html", "--csv", "runs.csv")
    assert "val/bits_per_character" in (tmp_path / "runs.csv").read_text().splitlines()[0]
