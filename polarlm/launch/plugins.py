"""What we add to Hydra: where else it looks for configuration."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from polarlm.locations import own_configs


class UserConfigs(SearchPathPlugin):
    """A folder `configs` where the command is typed adds choices to ours: configs/block/mine.yaml makes block=mine."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := own_configs()) is not None:
            search_path.append(provider="polarlm-user", path=folder.as_uri())


def register_plugins() -> None:
    """Tell Hydra about us, once per process."""
    known = Plugins.instance()
    if UserConfigs not in known.discover(SearchPathPlugin):
        known.register(UserConfigs)
