"""One training run in this process: prepare, open the folder, fit, finish."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.runs.files import read_json, write_json
from polarlm.runs.folder import choose_folder
from polarlm.runs.opening import open_folder
from polarlm.training.finish import finish
from polarlm.training.fit import fit
from polarlm.training.hardware import use_tensor_cores
from polarlm.training.job import build_job, headline
from polarlm.training.loggers.sinks import build_loggers, finish_loggers
from polarlm.training.quiet import quiet_libraries

FOLDER_VARIABLE = "POLARLM_RUN_DIR"  # how rank 0 tells the processes it starts where the run lives
RESULT_VARIABLE = "POLARLM_RESULT"  # a file that a job in a process of its own leaves its run folder's name in


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
    job = build_job(config)
    first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
    if FOLDER_VARIABLE in os.environ and not first:
        folder, again, note = Path(os.environ[FOLDER_VARIABLE]), True, None
    else:
        folder, again, note = choose_folder(config)
    if first:
        if note:
            print(note, file=sys.stderr)
        open_folder(folder, config, job.corpus, job.model.parameter_count(), again=again)
        print(headline(job, folder, again=again), file=sys.stderr, flush=True)
        if job.plan.processes > 1:
            os.environ[FOLDER_VARIABLE] = str(folder)
    loggers: list[Any] = []
    status = "finished"
    try:
        loggers = build_loggers(config, folder)
        fit(job, folder, loggers)
        if not first:
            return None
        summary = finish(job, folder, pictures)
        if RESULT_VARIABLE in os.environ:
            Path(os.environ[RESULT_VARIABLE]).write_text(str(folder.resolve()), encoding="utf-8")
        return Result(folder, summary)
    except BaseException as error:
        status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        if first:
            summary = read_json(folder / "summary.json") or {}
            write_json(
                folder / "summary.json", {**summary, "status": status, "error": f"{type(error).__name__}: {error}"}
            )
        raise
    finally:
        finish_loggers(loggers, status)  # after summary.json, which they copy
        os.environ.pop(FOLDER_VARIABLE, None) if first else None
