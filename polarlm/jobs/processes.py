"""A job in a process of its own that does not outlive the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.runs.lock import PATIENCE_VARIABLE
from polarlm.training.ranks import FOLDER_VARIABLE

PIPE_VARIABLE = "POLARLM_PARENT_PIPE"
GRACE = 20.0  # seconds in which a job may save its state once its parent is gone


def verb_command(verb: str = "train") -> list[str]:
    """The file and verb that started this process: train.py, or the installed command and its `train` (or `eval`)."""
    if verb == "train" and Path(sys.argv[0]).name == "train.py":
        return [str(Path(sys.argv[0]).resolve())]
    return ["-m", "polarlm", verb]


def start_job(
    overrides: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    verb: str = "train",
    ignore_usr2: bool = False,
) -> Any:
    """Start `train … overrides` (or eval); its output goes to `log` when given. The job ends when this process does.

    The job holds the reading end of a pipe whose writing end only we hold: however we die, the system closes it. With
    `ignore_usr2` it does not hear the signal that a cluster sends to every process of a job whose time is over.
    """
    # A named sweep sets hydra.mode=MULTIRUN: without RUN its jobs would be sweeps too, and overwrite its plan.
    command = [sys.executable, *verb_command(verb), *overrides, "hydra.mode=RUN"]
    if ignore_usr2:  # an ignored signal stays ignored through exec
        command = ["/bin/sh", "-c", "trap '' USR2; exec \"$@\"", "sh", *command]
    reader, writer = os.pipe()
    output = open(log, "ab") if log is not None else None  # noqa: SIM115  closed below; the job keeps its own copy
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, PIPE_VARIABLE: str(reader), PATIENCE_VARIABLE: str(GRACE)},
            pass_fds=(reader,),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # its ranks and workers form one group with it
        )
    finally:
        os.close(reader)
        if output is not None:
            output.close()
    process.lifeline = writer  # type: ignore[attr-defined]
    return process


def stop_job(process: Any) -> None:
    """Ask a job to save its state and end; insist after a while."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


def end_group(pid: int) -> None:
    """End the ranks and workers that a job left behind when it was killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def watch_parent() -> None:
    """End this process when the one that started it is gone: a job with its sweep, a rank with its first rank."""
    place = os.environ.pop(PIPE_VARIABLE, None)  # ranks started by this job are its own children
    if place is None:
        # Started by the first rank: a rank that torchrun, srun or a person started has another parent.
        if os.environ.get("LOCAL_RANK", "0") != "0" and FOLDER_VARIABLE in os.environ:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        return

    def wait() -> None:
        with os.fdopen(int(place), "rb") as pipe:
            pipe.read()  # returns when the last writer is gone
        _signal_group(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        _signal_group(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgid(pid), number)


def _end_with(parent: int) -> None:
    """A rank whose first rank was killed has nothing to save: the others wait for it for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
