"""Muon for the hidden matrices, AdamW for everything else (embedding, output, gains, the estimator's scalars).

Muon's update is an orthogonal matrix; scaled by 0.2 √max(rows, columns) its root mean square equals that of a typical
AdamW update (Liu et al. 2025, "Muon is scalable"), so one `lr` and one `weight_decay` serve both. All its singular
values are equal, so what leaves a matrix changes by 0.2 lr √width: over widths lr goes with 1/√width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from polarlm.training.optimisers.adamw import Role, groups_by_width, parameter_roles, width_ratio


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimisers that look like one: one list of groups for the schedule, one state for the checkpoint.

    Steps that went wrong are left out (`suppress`), on the device: nobody waits for the flag.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        self.stopped: torch.Tensor | None = None
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        """Let the parts read and write our groups and our state (loading replaces both)."""
        first = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    def suppress(self, stop: torch.Tensor) -> None:
        """Leave out the next step where `stop` holds."""
        self.stopped = stop
        self.parts[1].found_inf = stop.to(torch.float32)  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, for both parts."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._link()
        self._step_muon()
        self.parts[1].step()
        return loss

    def _step_muon(self) -> None:
        """torch's step, a matrix at a time: each is put back where the flag on the device says so."""
        muon, groups = self.parts[0], self.parts[0].param_groups
        if self.stopped is None:
            muon.step()
            return
        try:
            for group in groups:
                for parameter in (p for p in group["params"] if p.grad is not None):
                    momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                    kept = [(t, t.clone()) for t in map(_local, (parameter, momentum))]
                    muon.param_groups = [{**group, "params": [parameter]}]
                    muon.step()
                    for tensor, before in kept:
                        tensor.copy_(torch.where(self.stopped, before, tensor))
        finally:
            muon.param_groups = groups


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's rows of a sharded tensor (FSDP2), the tensor itself otherwise."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_hidden(parameter: nn.Parameter, group: str, module: nn.Module, inside: set[int]) -> bool:
    """Whether a parameter is the matrix of a linear map inside a block."""
    return group != "estimator" and parameter.ndim == 2 and isinstance(module, nn.Linear) and id(module) in inside


def muon(
    model: nn.Module,
    *,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    momentum: float,
    estimator_lr_factor: float,
    lr_base_width: int | None = None,
    fused: bool = True,
) -> MuonAndAdamW:
    """Muon and AdamW over the model's parameters, by the role of their modules."""
    blocks = [module for name, module in model.named_modules() if name.startswith("blocks.")]
    inside = {id(module) for block in blocks for module in block.modules()}
    hidden: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    rest: list[Role] = []
    for parameter, group, module in parameter_roles(model):
        if is_hidden(parameter, group, module, inside):
            hidden[group].append(parameter)
        else:
            rest.append((parameter, group, module))
    ratio = width_ratio(model, lr_base_width)
    muon_groups: list[dict[str, Any]] = [
        {"name": "hidden", "params": hidden["decay"], "weight_decay": weight_decay * ratio**0.5},
        {"name": "hidden_no_decay", "params": hidden["no_decay"], "weight_decay": 0.0},
    ]
    orthogonal = torch.optim.Muon(
        [group for group in muon_groups if group["params"]],
        lr=lr / ratio**0.5,
        momentum=momentum,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    others = groups_by_width(model, rest, lr_base_width, lr, weight_decay, estimator_lr_factor)
    adam = torch.optim.AdamW(others, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=fused)
    return MuonAndAdamW(orthogonal, adam)
