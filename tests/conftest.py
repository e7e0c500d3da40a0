"""What every test shares: fixed seeds, no network services, the real corpora's place."""

import ctypes
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import tests.quickly  # noqa: F401  (before anything imports Lightning)

ROOT = Path(__file__).resolve().parents[1]
# The product looks only where it is told to; so do the child processes that tests start.
SHARED = Path(os.environ.setdefault("POLARLM_SHARED_DATA", str(ROOT.parent / "shared" / "data")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: one of them at the end would leave the other processes without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_logfinish() -> None:
    """Give freed memory back to the system: glibc keeps it between small objects, up to 5 GB in one process."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 1 << 30:
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real corpora, or a clean skip where they are absent."""
    if not SHARED.exists():
        pytest.skip(f"no corpora at {SHARED} (set POLARLM_SHARED_DATA)")
    return SHARED
