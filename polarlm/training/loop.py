"""One training run in this process: prepare, open the folder, fit, finish."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.runs.files import read_json, write_json
from polarlm.runs.identity import refuse_secrets
from polarlm.runs.opening import open_run
from polarlm.runs.sweeps import RESULT_VARIABLE
from polarlm.training.attention_backend import RecordBackend
from polarlm.training.finish import finish
from polarlm.training.fit import fit
from polarlm.training.hardware import use_tensor_cores
from polarlm.training.job import build_job, describe_job
from polarlm.training.loggers.build import build_callbacks, build_loggers, finish_loggers
from polarlm.training.quiet import quiet_libraries
from polarlm.training.ranks import end_with_starter, forget_folder, is_first, share_folder, shared_folder
from polarlm.training.signals import SignOfLife
from polarlm.visible import fitted


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]


def train_run(config: dict[str, Any], pictures: Callable[[Path], Any] | None = None) -> Result | None:
    """Train one resolved configuration in this process (and the ones Lightning starts beside it).

    `pictures` draws into the folder of a trained run before it is called finished. Ranks other than 0 return None.
    """
    quiet_libraries()
    use_tensor_cores()
    refuse_secrets(config)
    if not is_first():
        end_with_starter()
    job = build_job(config)
    if not is_first():
        folder = shared_folder()
        fit(job, folder, extra=build_callbacks(config, folder))
        return None
    config = job.config
    folder, lock, again = open_run(config, job.corpus, job.model.parameter_count())
    loggers: list[Any] = []
    status = "finished"
    try:
        print(fitted(describe_job(job, folder, again=again), sys.stderr), file=sys.stderr, flush=True)
        chosen = {"accelerator": job.accelerator, "precision": job.precision, "compiled": job.compiled}
        known = read_json(folder / "environment.json") or {}
        write_json(folder / "environment.json", {**known, "chosen": {**chosen, "reasons": job.reasons}})
        share_folder(folder)
        loggers = build_loggers(config, folder)
        for url in filter(None, (getattr(logger, "url", None) for logger in loggers)):
            print(f"  wandb: {url}", file=sys.stderr, flush=True)
            write_json(folder / "summary.json", {**(read_json(folder / "summary.json") or {}), "wandb": url})
        fit(job, folder, loggers, extra=[*build_callbacks(config, folder), SignOfLife(lock), RecordBackend(folder)])
        summary = finish(job, folder, pictures)
        if RESULT_VARIABLE in os.environ:
            Path(os.environ[RESULT_VARIABLE]).write_text(str(folder.resolve()), encoding="utf-8")
        return Result(folder, summary)
    except BaseException as error:
        status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        with contextlib.suppress(Exception):  # a full disk, a damaged summary: what went wrong first is what counts
            summary = read_json(folder / "summary.json") or {}
            write_json(
                folder / "summary.json", {**summary, "status": status, "error": f"{type(error).__name__}: {error}"}
            )
        raise
    finally:
        finish_loggers(loggers, folder, status)  # after summary.json, which they copy
        lock.release()
        forget_folder()
