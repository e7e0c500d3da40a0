"""A job is one training run (or evaluation) to be done: its overrides, and the identity of the run it makes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarlm.runs.files import read_json
from polarlm.runs.identity import folder_of_run, key_of
from polarlm.runs.lock import PATIENCE_VARIABLE
from polarlm.training.ranks import FOLDER_VARIABLE

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"


@dataclass(frozen=True)
class JobSpec:
    """What to start, what to call it, and where its output goes."""

    overrides: tuple[str, ...]
    log: Path
    identity: str = ""  # of the run that it trains: a finished one is not trained again. Empty: always trained
    name: str = ""  # for people: the settings that tell it from the others
    runs_dir: Path | str = "runs"
    verb: str = "train"  # or eval
    swept: tuple[str, ...] = ()  # the keys that the sweep varies
    devices: int = 1  # GPUs that it needs

    @property
    def key(self) -> str:
        """Two jobs with the same key are the same job."""
        return f"{self.verb} {self.identity or ' '.join(self.overrides)}"

    @property
    def result(self) -> Path:
        """Where a training job leaves the name of its finished run's folder."""
        return self.log.with_name(f".{self.log.stem}.result")


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: str  # finished, failed, or stopped by us
    loss: float | None = None  # the validation loss of a finished training run
    error: str = ""
    folder: Path | None = None
    seconds: float = 0.0
    code: int = 0
    reused: bool = field(default=False)  # the run was finished before


def reuse_finished(job: JobSpec) -> Ended | None:
    """The outcome of a training job whose run is finished already, whatever its folder is called."""
    if job.verb != "train" or not job.identity:
        return None
    folder = folder_of_run(job.runs_dir, job.identity)
    summary = (read_json(folder / "summary.json") or {}) if folder else {}
    if summary.get("status") != FINISHED:
        return None
    return Ended(FINISHED, loss_in(summary), folder=folder, reused=True)


def outcome_of(job: JobSpec, code: int, seconds: float = 0.0) -> Ended:
    """The validation loss of a job whose process ended with `code`, or what its log says about the failure."""
    if code == 0 and job.verb != "train":
        return Ended(FINISHED, seconds=seconds)
    if code == 0 and job.result.exists():
        folder = Path(job.result.read_text(encoding="utf-8"))
        return Ended(FINISHED, loss_in(read_json(folder / "summary.json") or {}), folder=folder, seconds=seconds)
    error = f"{last_error(job.log) or describe_exit(code)} (log: {job.log})"
    return Ended(FAILED, error=error, seconds=seconds, code=code or 1)


def loss_in(summary: dict) -> float | None:
    """The validation loss of a summary; None where it has none (a diverged run)."""
    loss = summary.get("val/loss")
    return None if loss is None else float(loss)


def describe_exit(code: int) -> str:
    """What an exit code says where the job itself could not say anything."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", which is also what a machine without memory does" if name == "SIGKILL" else ""
    return f"killed by {name}{memory}; the same command resumes it"


def last_error(log: Path) -> str | None:
    """What a job's log says about its failure."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else None


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys whose values differ between jobs, in the order they were typed."""
    values: dict[str, set[str]] = {}
    for overrides in jobs:
        for text in overrides:
            values.setdefault(key_of(text), set()).add(text)
    return [key for key, choices in values.items() if len(choices) > 1] or list(values)[:1]


def shown(overrides: Sequence[str], varied: Collection[str]) -> str:
    """The overrides that tell a job from the others."""
    return " ".join(text for text in overrides if key_of(text) in varied)


# -- a job in a process of its own that does not outlive the process that started it ----------------------------------


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
