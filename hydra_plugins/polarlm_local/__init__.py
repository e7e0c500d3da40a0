"""Hydra takes launchers only from packages of this name; the launcher itself is polarlm.launch.local."""

from polarlm.launch.local import LocalLauncher as _LocalLauncher


class LocalLauncher(_LocalLauncher):
    """hydra/launcher=local."""
