"""Trackio as a sink: a live dashboard on this machine, without an account (`trackio show --project polarlm`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from polarlm.errors import UserError
from polarlm.training.loggers.sink import Sink


class TrackioSink(Sink):
    """One trackio run per run folder, under the folder's name; a continued run appends to it."""

    def __init__(self, config: dict[str, Any], folder: Path, *, group: str | None) -> None:
        try:
            import trackio
        except ImportError:
            raise UserError(
                "logger=trackio needs the trackio package, which is not installed: pip install 'polarlm[trackio]', "
                "or choose logger=wandb or logger=none"
            ) from None
        self.folder = folder
        run = trackio.init(
            project=config["logger"]["project"],
            name=folder.name,
            group=group,
            config=config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        super().__init__(run)

    name = "trackio"

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Copy a row; trackio keeps the step itself, `tokens` can be chosen as the x-axis."""
        kept = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        self.experiment.log(kept, step=step)

    def finish(self, status: str, summary: dict[str, float | str]) -> None:
        """Close the run; its last row is the summary."""
        self.experiment.log({**summary, "status": status})
        self.experiment.finish()
