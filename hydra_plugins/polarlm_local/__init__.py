"""Hydra takes launchers only from packages of this name; they are polarlm.jobs.sweep's."""

from polarlm.jobs.sweep import LocalLauncher as _LocalLauncher
from polarlm.jobs.sweep import SlurmLauncher as _SlurmLauncher


class LocalLauncher(_LocalLauncher):
    """hydra/launcher=local."""


class SlurmLauncher(_SlurmLauncher):
    """hydra/launcher=slurm."""
