"""A training run in a process of its own that is killed: at a named file operation, or at a moment from outside.

Every operation that changes names or flushes data (rename, link, unlink, mkdir, fsync) is a point, before and after
it; a run that notes them tells which there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

OPERATIONS = ("replace", "rename", "link", "unlink", "mkdir", "fsync")


def point(operation: str, moment: str, subject: Any) -> str:
    """'before replace last.ckpt': the file without numbers that differ from step to step or process to process."""
    name = "file"
    if isinstance(subject, int):
        with contextlib.suppress(OSError):
            name = Path(os.readlink(f"/proc/self/fd/{subject}")).name
    else:
        name = Path(os.fspath(subject)).name
    return f"{moment} {operation} {re.sub(r'[0-9]+', '#', name)}"


def watch_files(folder: str, kill_at: str | None, note: list[str] | None) -> None:
    """Wrap the operations of this process: note the points below `folder`, or die at one of them."""

    def reach(operation: str, moment: str, arguments: tuple[Any, ...]) -> None:
        subject = arguments[1] if operation in ("replace", "rename", "link") else arguments[0]
        where = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else os.fspath(subject)
        if not os.path.abspath(where).startswith(folder):
            return
        name = point(operation, moment, "runs" if os.path.abspath(where) == folder else subject)
        if note is not None:
            note.append(name)
        if name == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(operation: str) -> None:
        original = getattr(os, operation)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            reach(operation, "before", arguments)
            result = original(*arguments, **options)
            reach(operation, "after", arguments)
            return result

        setattr(os, operation, wrapped)

    for operation in OPERATIONS:
        wrap(operation)


def run(config: dict[str, Any], log: str, kill_at: str | None, notes: str | None) -> None:
    """Child: train the configuration; the exit code tells how it ended."""
    file = open(log, "a")  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    from polarlm.training import hardware
    from polarlm.training.loop import train_run

    hardware.measured_peak = lambda **_: 1e9
    points: list[str] | None = [] if notes else None
    watch_files(os.path.abspath(config["runs_dir"]), kill_at, points)
    try:
        train_run(config)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if notes:
        Path(notes).write_text(json.dumps(points))
    os._exit(0)


TIMES = (
    "seconds",
    "training_seconds",
    "processor_seconds",
    "tokens_per_second",
    "mfu",
    "peak_flops",
    "compile_seconds",
)


def _numbers(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES and not k.startswith("time/")} for row in rows]


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed."""
    from polarlm.runs.checkpoints import load_verified
    from polarlm.runs.tensor_files import tensors_of

    last = load_verified(folder / "checkpoints" / "last.ckpt")
    state = {key: last[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "weights": (folder / "checkpoints" / "model.safetensors").read_bytes(),
        "state": {name: tensor.numpy().tobytes() for name, tensor in tensors_of(state)},
        "step": last["global_step"],
        "best": load_verified(folder / "checkpoints" / "best.ckpt")["global_step"],
        "metrics": _numbers(folder / "metrics.jsonl"),
        "probes": (folder / "diagnostics" / "probe.jsonl").read_text(),
        "summary": {key: summary[key] for key in ("status", "val/loss", "sample", "step", "tokens")},
        "files": sorted(p.name for p in folder.rglob("*") if ".tmp" in p.name or p.name.endswith(".new")),
        # Shards of a step that was saved twice have a number behind its name.
        "checkpoints": sorted(
            re.sub(r"(step_[0-9]+)\.[0-9]+", r"\1", str(p.relative_to(folder)))
            for p in (folder / "checkpoints").rglob("*")
        ),
    }
