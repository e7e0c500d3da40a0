"""Commands as a user types them, in processes forked from one that has already imported the libraries."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import forks

ROOT = Path(__file__).resolve().parents[2]
# A model and a corpus so small that a run takes seconds; dropout on, so that random numbers matter.
TINY = [
    "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.context=32", "model.dropout=0.1",
    "tokenizer=byte", "trainer.max_steps=24", "trainer.batch_tokens=256", "trainer.micro_batch_tokens=128",
    "trainer.val_every=8", "trainer.checkpoint_every=6", "trainer.log_every=4", "diagnostics.every=8", "logger=none",
]  # fmt: skip


@dataclass
class Done:
    """How a command ended and what a person saw."""

    code: int
    out: str


def _signal_at(moment: str) -> None:
    """Send a signal to this process at a moment of a run, whatever the clock and the machine do meanwhile.

    'SIGTERM row 2': after the second row of metrics that this process writes. 'SIGKILL checkpoint 1': before its first
    new last.ckpt is in place; 'SIGKILL begun 4': after the first checkpoint of the fourth run of a sweep.
    """
    from polarlm.training.recorder import JsonLines

    name, what, wanted = moment.split()
    begun: list[object] = []

    def reach(kind: str, which: object) -> None:
        if kind == what and which not in begun:
            begun.append(which)
            if len(begun) == int(wanted):
                os.kill(os.getpid(), getattr(signal, name))

    write, replace = JsonLines.append, os.replace

    def append(self, row):
        write(self, row)
        if self.path.name == "metrics.jsonl":  # not a probe's
            reach("row", object())

    def replacing(source, target, **options):
        last = os.path.basename(target) == "last.ckpt"
        if last:
            reach("checkpoint", object())
        replace(source, target, **options)
        if last:
            reach("begun", os.path.dirname(target))

    JsonLines.append, os.replace = append, replacing


def _child(script: str, arguments: list[str], cwd: str, log: str, environment: dict[str, str]) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(ROOT))
    import torch
    from lightning.fabric.utilities import rank_zero

    from polarlm.training import hardware

    torch.set_num_threads(1)
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as if it were imported now, with this environment
    if not environment.get("WHOLE_PEAK"):
        measure = hardware.measured_peak
        hardware.measured_peak = lambda **_: measure(size=64, seconds=0.002)  # of the machine, not of what is tested
    if "SIGNAL_AT" in environment:
        _signal_at(environment["SIGNAL_AT"])
    runpy.run_path(script, run_name="__main__")


class Shell:
    """Runs train.py, eval.py and `python -m polarlm` in a folder of its own."""

    def __init__(self, folder: Path, context) -> None:
        self.folder, self.context, self.count = folder, context, 0
        text = "".join(f"{i * i % 97} times the river turned, and {i % 13} lamps were lit.\n\n" for i in range(900))
        self.corpus = folder / "corpus.txt"
        self.corpus.write_text(text)

    def start(self, script: str, *arguments: str, **environment: str):
        self.count += 1
        log = self.folder / f"log-{self.count}.txt"
        path = str(ROOT / script)
        process = self.context.Process(
            target=_child, args=(path, list(arguments), str(self.folder), str(log), environment)
        )
        process.start()
        process.log = log
        return process

    def wait(self, process, timeout: float = 550) -> Done:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            pytest.fail(f"still running after {timeout} s:\n{process.log.read_text()}")
        return Done(process.exitcode, process.log.read_text())

    def run(self, script: str, *arguments: str, **environment: str) -> Done:
        return self.wait(self.start(script, *arguments, **environment))

    def train(self, *arguments: str, **environment: str) -> Done:
        return self.run("train.py", *self.tiny(), *arguments, **environment)

    def tiny(self) -> list[str]:
        return [
            "data=text",
            f"data.path={self.corpus}",
            f"runs_dir={self.folder}/runs",
            f"cache_dir={self.folder}/cache",
            *TINY,
        ]

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    def summary(self, name: str) -> dict:
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())

    def weights(self, name: str) -> bytes:
        return (self.folder / "runs" / name / "checkpoints" / "model.safetensors").read_bytes()


TIMES = (
    "seconds",
    "training_seconds",
    "processor_seconds",
    "tokens_per_second",
    "mfu",
    "peak_flops",
    "compile_seconds",
)


def numbers(rows: list[dict]) -> list[dict]:
    """Rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in TIMES and not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="session")
def forkserver():
    return forks()


@pytest.fixture
def shell(tmp_path, forkserver):
    """A shell in an empty folder."""
    return Shell(tmp_path, forkserver)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, forkserver):
    """A shell shared by the tests of one file, with one finished run called `done`."""
    shell = Shell(tmp_path_factory.mktemp("workshop"), forkserver)
    done = shell.train("name=done", WHOLE_PEAK="1")
    assert done.code == 0, done.out
    shell.first = done
    return shell
