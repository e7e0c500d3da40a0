"""What a Polar layer decodes with: switches and scalars in numbers, or None where a switch asks for the long way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polarlm.attention.kernels.native_decode import Recipe
from polarlm.attention.polar_noise import directional_noise, radial_noise
from polarlm.attention.rows import SPHERE_EPS

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

# Switches that the recipe passes on whatever they are, and those that must have the value given here. A test holds both
# together against the block's signature, so that a new switch has to say which it is.
PASSED_ON = ("projection", "radial", "radial_correlation", "rotate_values", "lift", "evidence_clamp", "alpha_over_m",
             "residual_form", "forgetting", "forget_bias", "value_weight_decay", "project_stream",
             "frozen")  # fmt: skip
REQUIRED = {
    "norm_position": "both",
    "norm_scope": "per_head",
    "norm_gain": "none",
    "norm_values": True,
    "magnitude": True,
    "retract": "none",
    "irls_steps": 1,
    "frequencies": "shared",
    "head_gate": None,
    "value_residual": None,
    "transport": None,
    "radial_flow": "decay",
    "consensus": "none",
    "uncertainty": "none",
    "projector": "real",
    "tie_output": False,
}


def polar_recipe(mixer: PolarAttention) -> Recipe | None:
    """The recipe with the values that the scalars have now."""
    switches = {name: getattr(mixer, name) for name in REQUIRED if name not in ("norm_gain", "frequencies")}
    switches |= {"norm_gain": "none" if mixer.q_gain is None else "channel", "frequencies": mixer.frequencies.kind}
    if switches != REQUIRED or mixer.kernel not in ("student", "exponential"):
        return None
    scalars = mixer.estimator.read()
    return Recipe(
        heads=mixer.shape.n_head,
        kernel=mixer.kernel,
        noise=directional_noise(scalars),
        rotate_values=mixer.rotate_values,
        qk_radius=float(scalars["radius"] * 0.5**0.5),
        eps=SPHERE_EPS,
        residual_form=mixer.residual_form,
        norm_values=True,
        radial_mode="off" if mixer.radial == "none" else mixer.radial,
        radial=radial_noise(scalars, mixer.radial),
        radial_correlation=mixer.radial_correlation,
        projection=mixer.projection,
        evidence_clamp=mixer.evidence_clamp,
        alpha=float(scalars["alpha"]),
        alpha_by_m=not mixer.alpha_over_m,
        beta=float(scalars["beta"]) if "beta" in scalars else 0.0,
        forgets=mixer.forget is not None,
    )
