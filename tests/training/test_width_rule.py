"""optim.lr_base_width: one step changes what a model computes as much at width 512 as at 64 (a coordinate check)."""

import math

import pytest
import torch

from polarlm.model.build import build_model
from polarlm.training.optimisers import build_optimiser

WIDTHS = (64, 128, 256, 512)
ADAMW = dict(lr=3e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, estimator_lr_factor=0.5)
MODEL = dict(context=16, n_layer=2)
VOCABULARY = 97


def model_of(block: str, width: int, **options):
    torch.manual_seed(0)
    target = {"_target_": f"polarlm.attention.{block}", "_partial_": True}
    sizes = {**MODEL, "d_model": width, "n_head": width // 32, **options}
    return build_model({"model": sizes, "block": target}, VOCABULARY)


def optimiser_of(name: str, model, base: int | None):
    own = {"momentum": 0.95} if name == "muon" else {}
    target = f"polarlm.training.optimisers.{name}.{name}"
    return build_optimiser({"_target_": target, **ADAMW, **own, "lr_base_width": base}, model)


def changes(name: str, block: str, width: int, base: int | None, tied: bool) -> dict[str, float]:
    """RMS by which three steps change the logits and the last state of the stream."""
    model = model_of(block, width, tie_embeddings=tied)
    optimiser = optimiser_of(name, model, base)
    text = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(1))
    seen = []
    for step in range(4):
        record: list = []
        with torch.no_grad():
            logits = model(text[:, :-1], record=record)
        seen.append({"logits": logits, "stream": record[-1]["residual_out"]})
        optimiser.zero_grad()
        model.loss(text[:, :-1], text[:, 1:]).backward()
        optimiser.step()
    return {key: (seen[-1][key] - seen[0][key]).square().mean().sqrt().item() for key in seen[0]}


def growth(name: str, block: str, base: int | None, tied: bool) -> dict[str, float]:
    """The power of the width with which the changes grow."""
    rows = [changes(name, block, width, base, tied) for width in WIDTHS]
    logs = [math.log2(width) for width in WIDTHS]
    middle = sum(logs) / len(logs)
    return {
        key: sum((x - middle) * math.log2(row[key]) for x, row in zip(logs, rows))
        / sum((x - middle) ** 2 for x in logs)
        for key in rows[0]
    }
