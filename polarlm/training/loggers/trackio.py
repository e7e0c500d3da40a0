"""A live dashboard on this machine, without an account (`trackio show --project polarlm`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from polarlm.runs.files import json_lines
from polarlm.training.loggers import own_step


class TrackioLogger(Logger):
    """One trackio run per run folder, under the folder's name; a resumed run adds the steps that are missing."""

    name, version = "trackio", ""

    def __init__(self, project: str, name: str, folder: str, group: str | None = None, config: Any = None) -> None:
        super().__init__()
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.folder = Path(folder)
        known = [int(row["step"]) for row in SQLiteStorage.get_logs(project, name) if row.get("step") is not None]
        self.newest = max(known, default=-1)
        self._run = trackio.init(
            project=project, name=name, group=group, config=config, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._run

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The run was given the whole configuration when it was started."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Copy a row once; trackio keeps the step itself, `tokens` can be chosen as the x-axis."""
        step = own_step(metrics, step)
        if step is None or step >= self.newest + ("epoch" not in metrics):
            self.newest = self.newest if step is None else step
            kept = {name: value for name, value in metrics.items() if value is not None and name != "step"}
            self.experiment.log(kept, step=step)

    def replay(self) -> None:
        """Log the rows of metrics.jsonl that a kill kept from it."""
        for row in json_lines(self.folder / "metrics.jsonl"):
            self.log_metrics(row, step=row["step"])

    def finish(self, status: str, summary: dict[str, float | str]) -> None:
        """Close the run; its last row is the summary."""
        self.experiment.log({**summary, "status": status})
        self.experiment.finish()
