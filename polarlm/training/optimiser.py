"""AdamW over three parameter groups: decay, no_decay, and the estimator's scalars (ν, η, σ, μ …)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

GROUPS = ("decay", "no_decay", "estimator")


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Sort parameters by their module's `optim_group`, else matrices decay and vectors do not.

    The mark sits on the module and not on the parameter, because sharding (FSDP2) replaces parameters.
    """
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    seen: set[int] = set()
    for module in model.modules():
        mark = getattr(module, "optim_group", None)
        if mark is not None and mark not in GROUPS:
            raise ValueError(f"{type(module).__name__}.optim_group={mark!r}; it must be one of {GROUPS}")
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            groups[mark or ("decay" if parameter.ndim >= 2 else "no_decay")].append(parameter)
    return groups


def build_adamw(
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
    groups = parameter_groups(model)
    options: list[dict[str, Any]] = [
        {"name": "decay", "params": groups["decay"], "weight_decay": weight_decay},
        {"name": "no_decay", "params": groups["no_decay"], "weight_decay": 0.0},
        {"name": "estimator", "params": groups["estimator"], "weight_decay": 0.0, "lr": lr * estimator_lr_factor},
    ]
    devices = {p.device.type for group in groups.values() for p in group}
    fused = fused and "fused" in inspect.signature(torch.optim.AdamW).parameters and devices <= {"cpu", "cuda"}
    return torch.optim.AdamW(
        [g for g in options if g["params"]], lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=fused
    )
