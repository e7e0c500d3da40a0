"""Which of Polar's switches go together: refusals that say what to set, and what is left without effect."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polarlm.attention.estimator import choice
from polarlm.attention.polar_noise import CARRIED, RADIAL
from polarlm.errors import UserError

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

OFF = {"off": "none", "false": "none"}  # what a yaml or a command line makes of `off`
UNIT = {"on": "own", "true": "own", "off": "unit", "false": "unit"}  # the same for `magnitude`


def at_least(name: str, value: Any, lowest: int) -> Any:
    """A number that is not below its bound."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= lowest:
        raise UserError(f"block.{name} is {value!r}; it must be a number of at least {lowest}.")
    return value


def check_lift(lift: int) -> int:
    """How many real channels a head has per channel of the model's head."""
    if lift not in (1, 2):
        raise UserError(f"block.lift is {lift}; allowed: 1 (parameter parity with standard), 2 (the paper's d -> 2d).")
    return lift


def check_radial(radial: str, magnitude: bool, norm_values: bool) -> bool:
    """A radial channel estimates magnitudes, so there must be some."""
    if radial != "none" and not (magnitude and norm_values):
        raise UserError(
            f"block.radial={radial} estimates the magnitude of normalised values; it needs block.magnitude=own and "
            "block.norm_values=true. Set those, or block.radial=none."
        )
    return norm_values


def check_iterations(steps: int, kernel: str) -> int:
    """Reweighting needs something to weigh by."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UserError(f"block.irls_steps is {steps!r}; it must be a whole number of at least 1.")
    if kernel == "gaussian" and steps > 1:
        raise UserError(f"block.irls_steps={steps} needs residuals, and block.kernel=gaussian ignores them.")
    return steps


def check_transport(transport: str, allowed: tuple[str, ...], kernel: str, rotate_values: bool) -> None:
    """Something must be transported."""
    choice("transport", transport, allowed)
    if transport != "rotary" and kernel == "gaussian" and not rotate_values:
        raise UserError(
            f"block.transport={transport} has nothing to transport: block.kernel=gaussian compares no query and key, "
            "and block.rotate_values=false leaves values where they are. Set block.rotate_values=true."
        )


def check_tie(tie_output: bool, norm_position: str, gated: bool, projection: str, layer: int) -> bool:
    """Whose step is tangent to the stream exactly, and whose only while gains or gates are equal."""
    if tie_output and gated and projection in ("global", "evidence") and layer == 0:
        warnings.warn(
            f"block.head_gate=true with block.tie_output=true: gates that differ turn a step of block.projection="
            f"{projection} out of the tangent space; block.projection=per_head stays in it",
            stacklevel=3,
        )
    if tie_output and norm_position == "both" and layer == 0:
        warnings.warn(
            "block.tie_output=true with block.norm_position=both: the gains of the norm between stream and values make "
            "steps tangent to the stream only while they are equal; block.norm_position=post or pre has no such gains",
            stacklevel=3,
        )
    return tie_output


def check_uncertainty(uncertainty: str | bool, projection: str) -> str:
    """Appendix G.3 fuses a state with an estimate, along the sphere."""
    kind = choice("uncertainty", uncertainty, ("none", "carry"), OFF)
    if kind == "carry" and projection == "none":
        raise UserError(
            "block.uncertainty=carry damps a step from the token's direction, and block.projection=none takes none; "
            "set block.projection=per_head, global or evidence."
        )
    return kind


def check_carried(uncertainty: str, projection: str, values: Mapping[str, Tensor]) -> None:
    """Precision that damps no step, widens no variance and weighs no head is carried for nothing."""
    used = any(bool(values[name].any()) for name in ("prior_share", "widen_q", "widen_k"))
    if uncertainty == "carry" and not used and projection != "evidence":
        raise UserError(
            "block.uncertainty=carry has no effect: block.prior_share, block.widen_q and block.widen_k are all 0, and "
            f"block.projection={projection} asks for no evidence; make one positive, or set block.uncertainty=none."
        )


def check_consensus(
    consensus: str | bool, allowed: tuple[str, ...], projection: str, norm_values: bool, form: str, correlation: str
) -> str:
    """Appendix G.1 is a step along the sphere, weighed by angles."""
    kind = choice("consensus", consensus, allowed, OFF)
    if kind == "none":
        return kind
    if projection == "none" or not norm_values:
        raise UserError(
            f"block.consensus={kind} takes a tangent step between directions; it needs block.norm_values=true and "
            "block.projection=per_head, global or evidence."
        )
    if form != "full":
        raise UserError(f"block.consensus={kind} has a residual of its own; set block.residual_form=full, not {form}.")
    if kind == "complex" and correlation == "qk":  # even a token that hears only itself would turn by that phase
        raise UserError(
            "block.consensus=complex needs the phase between two states, and a token's query and key differ in phase "
            "already; set block.radial_correlation=vv or one, or block.consensus=gate."
        )
    return kind


def idle_settings(mixer: PolarAttention, given: Mapping[str, Any], values: Mapping[str, Tensor]) -> set[str]:
    """Settings of which no value makes a difference: idle switches, and what the values of others leave no use for."""
    idle = idle_switches(mixer)
    still = not bool(values["mu"].any())  # a rate of exactly 0 stays 0
    # A common factor of all precisions cancels in the weights; evidence, gates and priors see it.
    alone = mixer.shape.n_head == 1
    weighed = (mixer.projection == "evidence" and not alone) or mixer.consensus != "none" or mixer.uncertainty != "none"
    if mixer.kernel == "gaussian":
        # Noise that is left open is matched to radius and tau: all of it (a common factor), or a part (the ratio).
        left_open = [given[name] is None for name in ("eta_tk", "sigma_t0")]
        matched = any(left_open) and (weighed or not (all(left_open) or still))
        idle -= {"radius", "tau"} if matched else set()
        if still and not weighed:
            idle |= {"eta_tk", "sigma_t0"} | (set() if mixer.magnitude else {"m_inf"})
    if still:
        idle |= {"mu_spread"}
        idle |= {"radial_flow", "m_eq"} if mixer.radial == "none" else set()
        if not mixer.magnitude and mixer.radial_correlation == "one" and mixer.irls_steps == 1:
            idle |= {"eta_rk", "sigma_r0", "mu_r"}  # equal magnitudes: the gate's two precisions cancel
    idle |= {"projector"} if mixer.retract == "geodesic" else set()
    return idle | ({"evidence_clamp", "norm_scope"} if alone else set())


def idle_switches(mixer: PolarAttention) -> set[str]:
    """Parameters and switches that the other switches leave no use for; such parameters are not created."""
    idle = {"exponential": {"nu_t"}, "gaussian": {"nu_t", "tau", "eta_tq", "radius"}}.get(mixer.kernel, {"tau"})
    unused = {"none": set(RADIAL), "shared": set(RADIAL) - {"beta", "mu_r"}, "own": set()}[mixer.radial]
    idle |= unused if mixer.consensus == "none" else unused - {"eta_rk", "sigma_r0", "mu_r"}
    idle |= set(CARRIED) if mixer.uncertainty == "none" else set()
    idle |= {"projector"} if mixer.projection == "none" else set()
    idle |= {"m_eq"} if mixer.radial_flow == "decay" else set()
    idle |= {"gain"} if mixer.norm_position == "both" else set()
    idle |= {"radial_correlation"} if mixer.radial == mixer.consensus == "none" else set()
    idle |= {"evidence_clamp"} if mixer.projection != "evidence" else set()
    if mixer.kernel == "gaussian":
        idle |= {"norm_scope", "norm_gain", "residual_form", "widen_q"}
        idle |= set() if mixer.rotate_values else {"frequencies"}
    idle |= {"value_weight_decay"} if mixer.tie_output else set()
    idle |= {"forget_bias"} if mixer.forget is None else set()
    return idle | ({"norm_scope"} if mixer.norm_position == "pre" else set())
