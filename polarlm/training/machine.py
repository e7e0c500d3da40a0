"""How fast this machine multiplies matrices in fp32 and bf16: a few milliseconds, once per machine, then remembered."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from polarlm.attention.kernels.build import cache_folder, processor

SIZE = 128
LONGEST_SECONDS = 0.02  # per precision: bf16 without hardware for it is up to a hundred times slower


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a square matrix product."""

    fp32: float
    bf16: float


def cpu_speed() -> Speed:
    """This machine's speed with the threads torch uses, from its file or measured now."""
    key = f"{processor()}|{torch.get_num_threads()}|{torch.__version__}"
    try:
        path = cache_folder() / f"speed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        return Speed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        speed = measure_products()
        path.write_text(json.dumps(asdict(speed)), encoding="utf-8")
        return speed
    except (OSError, ValueError, TypeError):  # no place to remember it, or half a file
        return measure_products()


def measure_products(clock: Callable[[], float] = time.perf_counter) -> Speed:
    """The best of a few products in each precision; the run's own random numbers are left alone."""
    drawn = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = drawn.to(dtype)
        out, best, began = torch.empty_like(a), float("inf"), clock()
        while True:
            start = clock()
            torch.mm(a, a, out=out)
            best = min(best, clock() - start)
            if clock() - began > LONGEST_SECONDS:
                break
        rates.append(2 * SIZE**3 / max(best, 1e-9))
    return Speed(*rates)
