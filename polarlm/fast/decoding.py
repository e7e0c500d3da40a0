"""Decoding one token at a time, with a whole layer in one native call.

This needs pre-norm, GELU or SwiGLU, linear maps without hooks, and a mixer that one of the recipes below covers.
Scalars are read at the first token of a text and kept for it, so do not change weights while a cache is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polarlm.attention.mixer import KeyValueCache, TokenContext
from polarlm.attention.parts import SCALARS
from polarlm.attention.parts.forgetting import FORGOTTEN
from polarlm.attention.polar import PolarAttention
from polarlm.attention.rfa import RobustFilterAttention
from polarlm.attention.robust import DirectionalNoise
from polarlm.attention.standard import StandardAttention
from polarlm.attention.xsa import ExclusiveAttention
from polarlm.geometry.sphere import SPHERE_EPS
from polarlm.model.block import Block, PreNorm, decode_layer
from polarlm.model.feed_forward import GeluFeedForward, SwiGLUFeedForward
from polarlm.operations import faster

from .backends import distrust
from .native_decode import VECTOR, LayerDecoder, Matrices, Recipe, takes_decoding
from .passes import takes_products


@faster(decode_layer)
def decode_layer_natively(otherwise: Callable, block: Block, x: Tensor, context: TokenContext) -> Tensor:
    """For one token per row, x (B, 1, d); the decoder is made at the first one and stays with the cache."""
    cache = context.cache
    if cache is None or context.record is not None or not takes_decoding(x, cache):
        return otherwise(block, x, context)
    if cache.decoder is None:
        cache.decoder = _decoder(block, x, cache) or False
    if cache.decoder is False:
        return otherwise(block, x, context)
    decoder, forgotten = cache.decoder, cache.running.get(FORGOTTEN)
    if decoder.stored != cache.length and forgotten is not None:  # tokens that did not come through here
        decoder.remember(forgotten)
    out = decoder.step(x, *context.rotary, cache.length)
    cache.length += 1
    if decoder.forgotten is not None:
        cache.running[FORGOTTEN] = decoder.forgotten[..., : cache.length]
    return out


def _decoder(block: Block, x: Tensor, cache: KeyValueCache) -> LayerDecoder | None:
    weights, make = _weights(block, x), RECIPES.get(type(block.mixer))
    usable = block.mixer.backend in ("auto", "native") and distrust("native", "cpu") is None
    recipe = make(block.mixer) if usable and make is not None and weights is not None else None
    if recipe is None or weights is None:
        return None
    return LayerDecoder(recipe, weights, cache.keys, cache.values, cache.magnitudes)


def _weights(block: Block, x: Tensor) -> Matrices | None:
    """The layer's weights, if nothing but them says what it does."""
    ffn, mixer = block.feed_forward, block.mixer
    listened = any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())
    dropped = block.training and block.dropout.p > 0
    if type(block.mixer_norm) is not PreNorm or type(block.ffn_norm) is not PreNorm or listened or dropped:
        return None
    if type(ffn) is SwiGLUFeedForward:
        up, down, hidden = ffn.gate_up, ffn.down, ffn.hidden
    elif type(ffn) is GeluFeedForward:
        up, down, hidden = ffn.up, ffn.down, ffn.hidden
    else:
        return None
    if getattr(mixer, "out", None) is None:  # a tied output is W_v transposed
        return None
    parts = [getattr(mixer, name, None) for name in ("qkv", "qk", "v")]
    projections, whole = [part for part in parts if part is not None], not (x.shape[-1] % VECTOR or hidden % VECTOR)
    if not whole or not takes_products(x, *projections, mixer.out, up, down):
        return None
    return Matrices(
        norms=(block.mixer_norm.weight, block.ffn_norm.weight),
        projections=tuple(layer.weight for layer in projections),
        out=mixer.out.weight,
        up=up.weight,
        down=down.weight,
        gated=type(ffn) is SwiGLUFeedForward,
        across=block.tangent,
        eps=block.ffn_norm.eps,
        gate=None if mixer.forget is None else (mixer.forget.weight, mixer.forget.offset),
    )


# ----------------------------------------------------------------------------- what a mixer decodes with, in numbers


def standard_recipe(mixer: StandardAttention) -> Recipe | None:
    """Soft-max attention is the exponential kernel of −2 q·k at precision 1; XSA projects every head by itself."""
    additions = (mixer.q_norm, mixer.head_gate, mixer.value_residual)
    if mixer.frequencies.kind != "shared" or any(x is not None for x in additions):
        return None
    exclusive = isinstance(mixer, ExclusiveAttention) and mixer.exclusive
    return Recipe(
        heads=mixer.shape.n_head,
        kernel="exponential",
        noise=mixer.constant_precision(torch.device("cpu")),
        rotate_values=mixer.rotate_values,
        qk_radius=0.0,
        eps=0.0,
        residual_form="dot",
        projection="per_head" if exclusive else "none",
        forgets=mixer.forget is not None,
    )


def rfa_recipe(mixer: RobustFilterAttention) -> Recipe | None:
    """Frequencies of its own and additions take the ordinary pass."""
    additions = (mixer.head_gate, mixer.value_residual)
    if mixer.kernel == "student_mle" or mixer.frequencies.kind != "shared" or any(x is not None for x in additions):
        return None
    return Recipe(
        heads=mixer.shape.n_head,
        kernel=mixer.kernel,
        noise=mixer.noise(mixer.estimator.read()),
        rotate_values=mixer.rotate_values,
        qk_radius=0.5**0.5 if mixer.qk_norm else 0.0,
        eps=SPHERE_EPS,
        decay_keys=mixer.decay_keys,
        decay_values=mixer.decay_values,
    )


# Polar's settings that must have the value given here, and those that the recipe passes on whatever they are. One that
# is in neither must be what its part takes for it by default, so a new one is decoded by its own code until it is here.
REQUIRED = {
    "norm_position": "both",
    "norm_scope": "per_head",
    "norm_gain": "none",
    "norm_values": True,
    "magnitude": "own",
    "retract": "none",
    "irls_steps": 1,
    "frequencies": "shared",
    "head_gate": False,
    "value_residual": False,
    "transport": "rotary",
    "radial_flow": "decay",
    "consensus": "none",
    "uncertainty": "none",
    "projector": "real",
    "tie_output": False,
}
PASSED_ON = {"projection", "radial", "radial_correlation", "rotate_values", "lift", "evidence_clamp", "alpha_over_m",
             "residual_form", "forgetting", "forget_bias", "value_weight_decay", "mu_spread", "kernel",
             *SCALARS}  # fmt: skip


def polar_recipe(mixer: PolarAttention) -> Recipe | None:
    """The recipe with the values that the scalars have now."""
    parts, defaults = mixer.parts, {key: value for part in mixer.parts for key, value in part.arguments().items()}
    known = defaults | REQUIRED
    usual = all(known[key] == value for key, value in parts.settings().items() if key not in PASSED_ON)
    if not usual or parts.influence.kernel not in ("student", "exponential"):
        return None
    scalars = mixer.estimator.read()
    return Recipe(
        heads=mixer.shape.n_head,
        kernel=parts.influence.kernel,
        noise=DirectionalNoise.of(scalars),
        rotate_values=mixer.rotate_values,
        qk_radius=float(scalars["radius"] * 0.5**0.5),
        eps=SPHERE_EPS,
        residual_form=parts.influence.residual_form,
        norm_values=True,
        radial_mode=parts.radial.mode,
        radial=parts.radial.noise(scalars) if parts.radial.noisy else None,
        radial_correlation=parts.radial.radial_correlation,
        projection=parts.step.projection,
        evidence_clamp=parts.step.evidence_clamp,
        alpha=float(scalars["alpha"]),
        alpha_by_m=not parts.step.alpha_over_m,
        beta=float(scalars["beta"]) if "beta" in scalars else 0.0,
        forgets=mixer.forget is not None,
    )


# By exact type: a subclass may do something else.
RECIPES: dict[type, Callable[[Any], Recipe | None]] = {
    StandardAttention: standard_recipe,
    ExclusiveAttention: standard_recipe,
    RobustFilterAttention: rfa_recipe,
    PolarAttention: polar_recipe,
}
