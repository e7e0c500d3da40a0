"""The parts of the polar block, one file each, and how a block is put together from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from polarlm.attention.parts.aggregate import Aggregate
from polarlm.attention.parts.forgetting import Forgetting
from polarlm.attention.parts.influence import Influence
from polarlm.attention.parts.inputs import Inputs
from polarlm.attention.parts.output import Output
from polarlm.attention.parts.part import Part
from polarlm.attention.parts.precision import Precision
from polarlm.attention.parts.radial import Radial
from polarlm.attention.parts.step import PolarStep
from polarlm.attention.parts.transport import Transport
from polarlm.block_keys import flat_block
from polarlm.errors import UserError
from polarlm.part_rules import refuse_contradictions

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

# In the order in which they are built: each may look at those before it, and draws its fresh weights in this order.
KINDS: dict[str, type[Part]] = {
    "influence": Influence,
    "inputs": Inputs,
    "precision": Precision,
    "aggregate": Aggregate,
    "radial": Radial,
    "step": PolarStep,
    "output": Output,
    "forgetting": Forgetting,
    "transport": Transport,
}
# The order in which a block lists its scalars, by which optimisers in checkpoints number them; new ones come last.
SCALARS = (
    "nu_t", "tau", "prior_share", "context_power", "precision_0", "relax_a", "relax_b", "widen_q", "widen_k",
    "radius", "m_inf", "m_eq", "mu_r", "nu_r", "eta_rq", "eta_rk", "sigma_r0", "alpha", "beta",
    "eta_tk", "eta_tq", "sigma_t0", "mu", "gain",
)  # fmt: skip


class Parts:
    """The parts of one block."""

    inputs: Inputs
    transport: Transport
    precision: Precision
    influence: Influence
    forgetting: Forgetting
    aggregate: Aggregate
    radial: Radial
    step: PolarStep
    output: Output

    def __init__(self, block: PolarAttention, settings: Mapping[str, Any]) -> None:
        """Build every part from the settings (flat, by their names); a TypeError names one that no part has."""
        block.parts = self
        for name, kind in KINDS.items():
            setattr(self, name, kind(block, **{key: settings[key] for key in kind.arguments() if key in settings}))
        unknown = settings.keys() - {key for kind in KINDS.values() for key in kind.arguments()}
        if unknown:
            raise TypeError(f"no part of PolarAttention has the setting {sorted(unknown)[0]!r}")
        refuse_contradictions(self.settings())
        for part in self:
            part.check()

    def __iter__(self) -> Iterator[Part]:
        return (getattr(self, name) for name in KINDS)

    def settings(self) -> dict[str, Any]:
        """Every setting by its name, as its part understood it."""
        return {key: getattr(part, key) for part in self for key in part.arguments()}

    def unused(self) -> set[str]:
        """Parameters and switches that the chosen parts leave no use for; such parameters are not created."""
        return set().union(*(part.unused() for part in self))

    def without_effect(self) -> set[str]:
        """Settings of which no value makes a difference: the unused, and what the values of others leave no use for."""
        idle, precision, influence, radial = self.unused(), self.precision, self.influence, self.radial
        still = not bool(precision.scalars["mu"].any())  # a rate of exactly 0 stays 0
        alone = precision.block.shape.n_head == 1
        # A common factor of all precisions cancels in the weights; evidence, gates and priors see it.
        weighed = self.step.projection == "evidence" and not alone
        weighed = weighed or self.aggregate.consensus != "none" or precision.uncertainty != "none"
        if influence.kernel == "gaussian":
            # Noise that is left open is matched to radius and tau: all of it (a common factor), or a part (the ratio).
            left_open = [precision.eta_tk is None, precision.sigma_t0 is None]
            matched = any(left_open) and (weighed or not (all(left_open) or still))
            idle -= {"radius", "tau"} if matched else set()
            if still and not weighed:
                idle |= {"eta_tk", "sigma_t0"} | (set() if precision.magnitude == "own" else {"m_inf"})
        if still:
            idle |= {"mu_spread"}
            idle |= {"radial_flow", "m_eq"} if radial.radial == "none" else set()
            if precision.magnitude == "unit" and radial.radial_correlation == "one" and influence.irls_steps == 1:
                idle |= {"eta_rk", "sigma_r0", "mu_r"}  # equal magnitudes: the gate's two precisions cancel
        idle |= {"projector"} if self.step.retract == "geodesic" else set()
        return idle | ({"evidence_clamp", "norm_scope", "mu_spread"} if alone else set())


def flat_settings(parts: Mapping[str, str | Mapping[str, Any]], symbols: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen parts' settings and the symbols as one mapping, by the names of the parts' arguments."""
    words = {name: "none" if part is False else part for name, part in parts.items()}  # a yaml reads `off` as False
    chosen = {name: dict(part) if isinstance(part, Mapping) else {"kind": part} for name, part in words.items()}
    flat, known = flat_block(chosen), {key for kind in KINDS.values() for key in kind.arguments()}
    for name, value in symbols.items():
        for key in {"nu": ("nu_t",), "eta": ("eta_tq", "eta_tk")}.get(name, (name,)):
            if key not in flat.keys() | known or key in chosen:
                raise UserError(f"block.{name} is no setting of the polar block.")
            if not any(key in part for part in chosen.values()):
                flat[key] = value
    return {key: value for key, value in flat.items() if key not in ("project_stream", "frozen", "backend")}
