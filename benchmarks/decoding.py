"""(c) Decoding one token at a time with a cache: tokens per second, early and late in the text."""

from __future__ import annotations

import time

import torch

from benchmarks.blocks import build


@torch.no_grad()
def decoding(blocks: tuple[str, ...], length: int, **shape) -> list[dict]:
    """Seconds for `length` tokens, and the cost of the last tenth relative to the first (1 would be O(1) attention)."""
    rows = []
    for block in blocks:
        model = build(block, length, **shape).eval()
        cache, token, times = model.new_cache(1, length), torch.zeros(1, 1, dtype=torch.long), []
        for _ in range(length):
            began = time.perf_counter()
            token = model(token, cache=cache)[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - began)
        tenth = length // 10
        growth = sorted(times[-tenth:])[tenth // 2] / sorted(times[:tenth])[tenth // 2]
        rows.append({"block": block, "seconds": sum(times), "tokens/s": length / sum(times), "late/early": growth})
    return rows
