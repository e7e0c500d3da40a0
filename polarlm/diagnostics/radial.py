"""The radial side: how large the residual stream and the latent state are, and what makes them grow (App. E).

All growths are in RMS units, ‖·‖/√dim. The paper's claim is that attention without projection grows the latent state
by α⟨v, v̄⟩/r² to first order, and that the tangent projection removes this; both are measured here, not assumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.attention.mixer import merge_heads
from polarlm.diagnostics.layer import MIN_STEP, TINY, Layer, angle, line_fit, root_mean_square, tangency, wide


def radial_values(layer: Layer) -> dict[str, Tensor]:
    """Scalars () and per-head numbers (H,) of one layer, without the leading `radial/`."""
    before, middle, after = (root_mean_square(z) for z in (layer.before, layer.middle, layer.after))  # (B, T)
    m, state, tangent = layer.magnitude, layer.state, merge_heads(layer.update)
    update = tangent
    if "delta_m" in layer.record:
        delta_m = wide(layer.record["delta_m"])
        update = tangent + (layer.parameters["beta"] * delta_m).unsqueeze(-1) * layer.direction
    estimate = merge_heads(layer.alpha * layer.estimate)

    predicted = (layer.direction * estimate).mean(-1)  # α⟨V, v̄⟩/r² with r² = D
    latent = root_mean_square(state + update) - m
    stream = middle - before
    step = angle(state, state + update)
    values = {
        "growth": (after - before).mean(),
        "growth_attention": stream.mean(),
        "growth_ffn": (after - middle).mean(),
        "growth_predicted": predicted.mean(),
        "growth_latent": latent.mean(),
        "growth_latent_unprojected": (root_mean_square(state + estimate) - m).mean(),
        "magnitude": m.mean(),
        "magnitude_std": m.std(),
        "magnitude_max": m.max(),
        "tangency_latent": tangency(state, tangent).nanmean(),
        "tangency_attention": tangency(layer.before, layer.middle - layer.before).nanmean(),
        "tangency_ffn": tangency(layer.middle, layer.after - layer.middle).nanmean(),
        "angular_step_latent": step.mean(),
        "angular_step_attention": angle(layer.before, layer.middle).mean(),
        "angular_step_ffn": angle(layer.middle, layer.after).mean(),
        "resultant_length": _resultant_length(layer).mean((0, 2)),
        "spectral_mass": (layer.values.square().sum(-1) / layer.values.square().sum((1, 3)).unsqueeze(1)).mean((0, 2)),
    }
    values["growth_slope"], values["growth_r2"] = line_fit(predicted.flatten(), stream.flatten())
    values["growth_latent_slope"], values["growth_latent_r2"] = line_fit(predicted.flatten(), latent.flatten())
    # The paper's resistance: a state of large magnitude turns less, angle ∝ 1/m, slope −1 on log-log axes.
    turned = step > MIN_STEP
    values["resistance_slope"], values["resistance_r2"] = line_fit(m[turned].clamp_min(TINY).log(), step[turned].log())
    if "delta_m" in layer.record:
        values["delta_m"] = delta_m.mean()
        values["delta_m_relative"] = (delta_m / m.clamp_min(TINY)).mean()
        values["delta_m_negative"] = (delta_m < -MIN_STEP * m).to(m.dtype).mean()  # a first token's Δm is rounding
    return values


def stream_values(z: Tensor) -> dict[str, Tensor]:
    """Size of the residual stream (B, T, d) at one depth."""
    rms = root_mean_square(wide(z))
    return {
        "residual_rms": rms.mean(),
        "residual_rms_std": rms.std(),
        "residual_rms_p99": torch.quantile(rms.flatten(), 0.99),
        "residual_rms_first": rms[:, 0].mean(),
    }


def _resultant_length(layer: Layer) -> Tensor:
    # ‖Σ A v‖ / Σ A‖v‖ (B, H, T): 1 iff all attended directions agree; ‖v̄‖/r when every value has radius r.
    attended = (layer.weights @ layer.values.norm(dim=-1, keepdim=True)).squeeze(-1)
    return layer.estimate.norm(dim=-1) / attended.clamp_min(TINY)
