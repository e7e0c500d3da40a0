"""How fast this machine multiplies matrices in fp32 and bf16: a few milliseconds, once per machine, then remembered."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass

import torch

from polarlm.locations import cache_folder, processor

SIZE = 128
SECONDS = 0.02  # of processor time per precision: bf16 without hardware for it is up to a hundred times slower


@dataclass(frozen=True)
class Speed:
    """FLOP/s of square matrix products on all threads together."""

    fp32: float
    bf16: float


def cpu_speed() -> Speed:
    """This machine's speed with the threads torch uses, from its file or measured now."""
    key = f"{processor()}|{torch.get_num_threads()}|{torch.__version__}|processor time"
    try:
        path = cache_folder() / f"speed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        return Speed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        speed = measure_products()
        path.write_text(json.dumps(asdict(speed)), encoding="utf-8")
        return speed
    except (OSError, ValueError, TypeError):  # no place to remember it, or half a file
        return measure_products()


def measure_products() -> Speed:
    """Products in each precision; the run's own random numbers are left alone.

    One thread is measured, by its processor time: on a busy machine threads wait for each other, and by the wall clock
    a product then took a thousand times as long, which was remembered for ever.
    """
    drawn = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    threads, rates = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            a = drawn.to(dtype)
            out = torch.mm(a, a)  # the first one prepares
            products, began, spent = 0, time.thread_time(), 0.0
            while spent < SECONDS:
                torch.mm(a, a, out=out)
                products, spent = products + 1, time.thread_time() - began
            rates.append(threads * products * 2 * SIZE**3 / spent)
    finally:
        torch.set_num_threads(threads)
    return Speed(*rates)
