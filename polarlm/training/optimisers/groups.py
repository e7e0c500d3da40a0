"""Parameters sorted by the role of the module that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

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
