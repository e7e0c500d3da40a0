"""Other libraries' chatter, kept away from what a person reads."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Silence what Lightning says to developers of Lightning; our own messages stay readable."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        ".*have no `validation_step`.*",
        ".*does not have many workers.*",
        ".*your dataloader is not resumable.*",  # it is: a batch is a function of its step
        ".*LeafSpec.*",
        ".*Checkpoint directory.*",
        ".*isinstance\\(treespec.*",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.formatwarning = lambda message, *where: f"warning: {message}\n"  # the place in our code helps nobody
