"""Optimisers, and what happens to the gradients before a step.

A yaml in configs/optim names a function of (model, fused, its options), `adamw` or `muon`. A yaml of the user may also
name a class like torch.optim.SGD, which gets the parameters and its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.errors import UserError
from polarlm.targets import target_of

# Settings of a step that hold for every optimiser; the rest of the group is the optimiser's own.
STEP_SETTINGS = ("grad_clip",)
GROUPS = ("decay", "no_decay", "estimator")
Role = tuple[nn.Parameter, str, nn.Module]


def build_optimiser(optim: dict[str, Any], model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """The optimiser that `optim` names, over all trainable parameters of the model."""
    build, options = target_of(optim, "optim", torch.optim.Optimizer)
    options = {key: value for key, value in options.items() if key not in STEP_SETTINGS}
    try:
        is_class = isinstance(build, type)
        optimiser = build(model.parameters(), **options) if is_class else build(model, fused=fused, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optim can't be built: {error}") from error
    keep_constraints(model, optimiser)
    return optimiser


def keep_constraints(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """After every step, let each module that has an `after_step` put its weights back where they belong."""
    constrained: list[Any] = [module for module in model.modules() if hasattr(module, "after_step")]

    def call(*_: Any) -> None:
        for module in constrained:
            module.after_step()

    optimiser.register_step_post_hook(call)


# -- from accumulated gradients to the ones a step is taken with ------------------------------------------------------


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist, in the order of their parameters."""
    return [p.grad for p in parameters if p.grad is not None]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, the same on every process, without waiting for the device."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients (FSDP2) sum over ranks


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place by a number that lives on the device."""
    pieces = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    if pieces:
        torch._foreach_mul_(pieces, factor)


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradients in place so that their total norm is at most `limit`."""
    scale(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))


# -- AdamW over three parameter groups: decay, no_decay, and the estimator's scalars (ν, η, σ, μ …) -------------------


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


# -- Muon for the hidden matrices, AdamW for everything else (embedding, output, gains, the estimator's scalars) -------
#
# Muon's update is an orthogonal matrix; scaled by 0.2 √max(rows, columns) its root mean square equals that of a typical
# AdamW update (Liu et al. 2025, "Muon is scalable"), so one `lr` and one `weight_decay` serve both. All its singular
# values are equal, so what leaves a matrix changes by 0.2 lr √width: over widths lr goes with 1/√width.


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
