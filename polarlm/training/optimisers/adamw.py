"""AdamW over three parameter groups: decay, no_decay, and the estimator's scalars (ν, η, σ, μ …)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polarlm.training.optimisers.groups import parameter_groups


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    estimator_lr_factor: float,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW with the three groups of `parameter_groups`, fused where it may be and the device supports it."""
    options = adamw_groups(parameter_groups(model), lr, weight_decay, estimator_lr_factor)
    devices = {p.device.type for group in options for p in group["params"]}
    fused = fused and "fused" in inspect.signature(torch.optim.AdamW).parameters and devices <= {"cpu", "cuda"}
    return torch.optim.AdamW(options, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=fused)


def adamw_groups(
    groups: Mapping[str, list[nn.Parameter]], lr: float, weight_decay: float, estimator_lr_factor: float
) -> list[dict[str, Any]]:
    """The groups that have parameters, as AdamW takes them: only `decay` decays, the estimator has its own rate."""
    options: list[dict[str, Any]] = [
        {"name": "decay", "params": groups["decay"], "weight_decay": weight_decay},
        {"name": "no_decay", "params": groups["no_decay"], "weight_decay": 0.0},
        {"name": "estimator", "params": groups["estimator"], "weight_decay": 0.0, "lr": lr * estimator_lr_factor},
    ]
    return [group for group in options if group["params"]]
