"""What the sinks of our own share."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only


class Sink(Logger):
    """A Lightning logger without versions, whose run was given the whole configuration when it was opened."""

    version = ""

    def __init__(self, experiment: Any) -> None:
        super().__init__()
        self._experiment = experiment

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to tell."""
