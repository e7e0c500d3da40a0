"""Optional packages that shipped loggers need, checked without importing anything heavy."""

from __future__ import annotations

import importlib.util
from typing import Any

from polarlm.errors import UserError

# Modules that shipped loggers need and that come with an extra.
NEEDED = {"TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow", "TrackioLogger": "trackio"}


def require_packages(config: dict[str, Any]) -> None:
    """Refuse a logger whose package is not installed."""
    for group in ("logger", "callbacks"):
        for name, section in (config.get(group) or {}).items():
            needed = NEEDED.get(str(section.get("_target_")).rpartition(".")[2])
            if needed and importlib.util.find_spec(needed) is None:
                raise UserError(
                    f"{group}={name} needs the {needed} package, which is not installed: "
                    f"pip install 'polarlm[{needed}]', or choose logger=wandb, logger=csv or logger=none"
                )
