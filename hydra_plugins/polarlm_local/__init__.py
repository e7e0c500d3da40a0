"""Hydra takes launchers and sweepers only from packages of this name; the launchers are polarlm.jobs.sweep's."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from polarlm.block_keys import expanded
from polarlm.jobs.sweep import LocalLauncher as _LocalLauncher
from polarlm.jobs.sweep import SlurmLauncher as _SlurmLauncher


class LocalLauncher(_LocalLauncher):
    """hydra/launcher=local."""


class SlurmLauncher(_SlurmLauncher):
    """hydra/launcher=slurm."""


class VariantSweeper(BasicSweeper):
    """Hydra's own sweeper, which also knows blocks that are other blocks with other settings (block_keys.VARIANTS).

    It is defined here because Hydra executes its own plugins again before it imports this file: a subclass made
    earlier would extend a class that is no longer the one its methods name.
    """

    @staticmethod
    def split_arguments(overrides: list[Any], max_batch_size: int | None) -> list[list[list[str]]]:
        """The jobs of a sweep, each with its overrides written out."""
        batches = BasicSweeper.split_arguments(overrides, max_batch_size)
        return [[expanded(job) for job in batch] for batch in batches]
