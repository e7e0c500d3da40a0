"""AdamW over three parameter groups: decay, no_decay, and the estimator's scalars (ν, η, σ, μ …)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polarlm.training.optimisers.groups import Role, parameter_groups, parameter_roles, sums_over_width, width_ratio


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    estimator_lr_factor: float,
    lr_base_width: int | None = None,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW with the three groups of `parameter_groups`, fused where it may be and the device supports it."""
    options = groups_by_width(model, parameter_roles(model), lr_base_width, lr, weight_decay, estimator_lr_factor)
    devices = {p.device.type for group in options for p in group["params"]}
    fused = fused and devices <= {"cpu", "cuda"}
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


def groups_by_width(
    model: nn.Module, roles: Iterable[Role], base: int | None, lr: float, weight_decay: float, lr_factor: float
) -> list[dict[str, Any]]:
    """The same groups, with matrices that sum over the width apart: learning rate over the ratio, decay times it.

    An element of AdamW's step is about lr, and the elements of a row add up over the width: lr / ratio changes what
    leaves the matrix as much as lr did at the base width. lr x weight_decay, the share that decays per step, stays.
    """
    ratio = width_ratio(model, base)
    plain: list[Role] = []
    wide: list[Role] = []
    for role in roles:
        (wide if base is not None and sums_over_width(model, role[0], role[2]) else plain).append(role)
    scaled = adamw_groups(parameter_groups(wide), lr / ratio, weight_decay * ratio, lr_factor)
    return [
        *adamw_groups(parameter_groups(plain), lr, weight_decay, lr_factor),
        *({**group, "name": f"{group['name']}_by_width", "lr": lr / ratio} for group in scaled),
    ]
