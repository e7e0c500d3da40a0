"""(c) Decoding one token at a time with a cache: tokens per second, early and late in the text, one row or many."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.blocks import build


@torch.no_grad()
def decoding(blocks: tuple[str, ...], length: int, batch: int = 1, **shape) -> list[dict]:
    """Median time of a token, relative to the first block's, and of the last tenth of the text relative to the first.

    All blocks take their turn at every token, so that ratios do not see the machine's mood.
    """
    models = {name: build(name, length, **shape).eval() for name in blocks}
    caches = {name: model.new_cache(batch, length) for name, model in models.items()}
    tokens = {name: torch.zeros(batch, 1, dtype=torch.long) for name in blocks}
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(length):
        for name, model in models.items():
            began = time.perf_counter()
            tokens[name] = model(tokens[name], cache=caches[name])[:, -1].argmax(-1, keepdim=True)
            times[name].append(time.perf_counter() - began)
    tenth = max(1, length // 10)
    middle = {name: statistics.median(spent) for name, spent in times.items()}
    return [
        {
            "block": name,
            "rows": batch,
            "ms/token": 1e3 * middle[name],
            "ratio": middle[name] / middle[blocks[0]],
            "tokens/s": batch / middle[name],
            "late/early": statistics.median(times[name][-tenth:]) / statistics.median(times[name][:tenth]),
        }
        for name in blocks
    ]
