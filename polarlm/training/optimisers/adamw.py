"""AdamW over three parameter groups: decay, no_decay, and the estimator's scalars (ν, η, σ, μ …)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


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


# -- parameters sorted by the role of the module that holds them ------------------------------------------------------


GROUPS = ("decay", "no_decay", "estimator")
Role = tuple[nn.Parameter, str, nn.Module]


def parameter_roles(model: nn.Module) -> Iterator[Role]:
    """(parameter, group, module) of every trainable parameter, each once.

    The group is the module's `optim_group`; without one, matrices decay and vectors do not. The mark sits on the module
    and not on the parameter, because sharding (FSDP2) replaces parameters.
    """
    seen: set[int] = set()
    for module in model.modules():
        mark = getattr(module, "optim_group", None)
        if mark is not None and mark not in GROUPS:
            raise ValueError(f"{type(module).__name__}.optim_group={mark!r}; it must be one of {GROUPS}")
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            yield parameter, mark or ("decay" if parameter.ndim >= 2 else "no_decay"), module


def parameter_groups(roles: Iterable[Role]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each group, in the order given."""
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for parameter, group, _ in roles:
        groups[group].append(parameter)
    return groups


def sums_over_width(model: nn.Module, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Whether a parameter is a matrix whose rows add up over the width: hidden maps, gates, the output.

    A lone embedding only picks rows; a tied one is the output too, and that decides.
    """
    if parameter.ndim < 2 or getattr(module, "optim_group", None) == "estimator":
        return False
    head = getattr(model, "head", None)
    return not isinstance(module, nn.Embedding) or (head is not None and head.weight is parameter)


def width_ratio(model: nn.Module, lr_base_width: int | None) -> float:
    """How much wider the model is than the one its learning rate was found for; 1 when that is not said."""
    if lr_base_width is None:
        return 1.0
    width: int = model.config.d_model  # type: ignore[union-attr, assignment]
    return width / lr_base_width
