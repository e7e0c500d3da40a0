"""A job is one training run (or evaluation) to be done: its overrides, and the identity of the run it makes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polarlm.runs.files import read_json
from polarlm.runs.sweeps import folder_of_run, key_of

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
    return f"killed by {name}{memory}; the same command continues it"


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


def shown(overrides: Sequence[str], varied: Sequence[str]) -> str:
    """The overrides that tell a job from the others."""
    return " ".join(text for text in overrides if key_of(text) in varied)
