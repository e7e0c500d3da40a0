"""Which choices of the polar block's parts contradict each other; imports nothing heavy.

A part checks its own settings. What depends on two parts stands here, so that a typed contradiction is refused before
torch is imported (launch/check.py) and one given in Python when the block is built (attention/parts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polarlm.errors import UserError


def refuse_contradictions(old: Mapping[str, Any]) -> None:
    """A UserError where parts of a polar block contradict each other, from all its settings by their old names."""
    for contradicts, message in _contradictions(old):
        if contradicts:
            raise UserError(message)


def _contradictions(old: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Every rule: whether the settings break it, and what is said then."""
    raw, projection, kernel = not old["norm_values"], old["projection"], old["kernel"]
    radial, consensus, retract = old["radial"], old["consensus"], old["retract"]
    gated, carried = consensus != "none", old["uncertainty"] == "carry"
    tangent = "block.step.projection=per_head, global or evidence"
    yield (
        radial != "none" and (raw or old["magnitude"] == "unit"),
        f"block/radial={radial} estimates the magnitude of values on the sphere; it needs block/inputs=sphere and a "
        "block/precision of the token's own magnitude (magnitude). Set those, or block/radial=none.",
    )
    step = "geodesic" if retract == "geodesic" else "retracted"
    yield retract != "none" and raw, f"block/step={step} moves on the sphere; it needs block/inputs=sphere."
    yield (
        retract in ("norm", "exp") and projection == "none",
        f"block/step=retracted starts from a tangent step, and block.step.projection=none takes none; set {tangent}.",
    )
    yield (
        retract == "geodesic" and projection != "global",
        "block/step=geodesic walks from the whole direction towards the whole estimate; it needs "
        f"block.step.projection=global, not {projection}.",
    )
    yield (
        gated and (projection == "none" or raw),
        f"block/aggregate={consensus} takes a tangent step between directions; it needs block/inputs=sphere and "
        f"{tangent}.",
    )
    yield (
        gated and old["residual_form"] != "full",
        f"block/aggregate={consensus} defines its own residual; set block.influence.residual_form=full, not "
        f"{old['residual_form']}.",
    )
    yield (
        old["residual_form"] == "dot" and kernel != "exponential",
        f"block.influence.residual_form=dot is no distance, and block/influence={kernel} needs one; set "
        "block/influence=exponential, or block.influence.residual_form=full.",
    )
    where = "aggregate" if radial == "none" else "radial"
    correlated = (gated or radial != "none") and old["radial_correlation"] == "qk"
    yield (
        correlated and kernel == "gaussian",
        f"block.{where}.radial_correlation=qk correlates queries and keys, and block/influence=gaussian has none; set "
        f"block.{where}.radial_correlation to vv or one.",
    )
    yield (  # even a token that hears only itself would turn by that phase
        correlated and consensus == "complex",
        f"block.{where}.radial_correlation=qk correlates a token's query and key, whose phases differ already, and "
        f"block/aggregate=complex turns values by the phase; set block.{where}.radial_correlation to vv or one.",
    )
    yield (
        kernel == "gaussian" and old["irls_steps"] > 1,
        f"block.influence.irls_steps={old['irls_steps']} reweights by residuals, and block/influence=gaussian ignores "
        "them; set 1, or another block/influence.",
    )
    yield (
        old["transport"] != "rotary" and kernel == "gaussian" and not old["rotate_values"],
        f"block/transport={old['transport']} has nothing to transport: block/influence=gaussian compares no query and "
        "key, and block.transport.rotate_values=false leaves values where they are; set "
        "block.transport.rotate_values=true.",
    )
    flow, stay = ("carried", "block.precision.m_eq=null") if carried else ("equilibrium", "block/precision=magnitude")
    yield (
        old["radial_flow"] == "equilibrium" and not _positive(old["mu"]) and not _positive(old["mu_r"]),
        f"block/precision={flow} moves magnitudes to m_eq at the rate block.mu, which is 0; make it positive, or set "
        f"{stay}.",
    )
    yield (
        carried and projection == "none",
        "block/precision=carried damps a step from the token's direction, and block.step.projection=none takes none; "
        f"set {tangent}.",
    )
    yield (
        carried
        and projection != "evidence"
        and not any(_positive(old[n]) for n in ("prior_share", "widen_q", "widen_k")),
        "block/precision=carried has no effect: block.precision.prior_share, widen_q and widen_k are all 0, and "
        f"block.step.projection={projection} asks for no evidence; make one positive, or set "
        "block/precision=magnitude.",
    )
    for part, noise, floor in (("precision", "eta_tk", "sigma_t0"), (where, "eta_rk", "sigma_r0")):
        yield (
            _both_zero(old[noise], old[floor]),
            f"block.{part}.{noise} and block.{part}.{floor} are both 0: infinite precision; make one positive.",
        )


def _heads(value: Any) -> list[Any]:
    """A number, or one per head, as a list."""
    return list(value) if isinstance(value, Sequence) else [value]


def _positive(value: Any) -> bool:
    return any(number > 0 for number in _heads(value))


def _both_zero(noise: Any, floor: Any) -> bool:
    """Whether any head has neither; null is matched, and never 0."""
    noises, floors = _heads(noise), _heads(floor)
    heads = max(len(noises), len(floors))
    noises, floors = (values * heads if len(values) == 1 else values for values in (noises, floors))
    return any(a == b == 0 for a, b in zip(noises, floors))
