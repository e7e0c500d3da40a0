"""Titles, units and meanings of the probe's quantities; an unknown quantity is shown under its own name."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """Title and unit of a probed quantity, for an axis, and a sentence for a reader who has not met it."""

    title: str
    unit: str = ""
    meaning: str = ""

    @property
    def within_block(self) -> bool:
        """Its scale means something within a block only, so that maps of two blocks get a scale each."""
        return "Compare within a block" in self.meaning

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


RMS = "RMS units"
# The last part of the name decides; the part before the slash (radial, precision, …) is the section of the page.
_WORDS = {
    "residual_rms": ("residual RMS", "", "Size of the residual stream per channel."),
    "residual_rms_std": ("residual RMS, spread over tokens",),
    "residual_rms_p99": ("residual RMS, 99th percentile", "", "The size that one token in a hundred exceeds."),
    "residual_rms_first": ("residual RMS of the first token", "", "Often an outlier: the attention sink."),
    "growth": ("growth of the residual RMS", RMS, "Growth by attention and feed-forward together."),
    "growth_attention": ("growth of the stream by attention", RMS),
    "growth_ffn": ("growth of the stream by the feed-forward", RMS),
    "growth_predicted": ("predicted growth α⟨v, v̄⟩/r²", RMS, "The paper's first-order growth without projection."),
    "growth_latent": ("growth of the latent state", RMS, "Change of the values' length by attention's update."),
    "growth_latent_unprojected": ("growth of the latent state without projection", RMS),
    "growth_slope": ("slope of the stream's growth on the prediction", "", "1 if the stream grows as predicted."),
    "growth_r2": ("R² of the stream's growth on the prediction",),
    "growth_latent_slope": ("slope of latent growth on the prediction", "", "1: grows as predicted; 0: no growth."),
    "growth_latent_r2": ("R² of latent growth on the prediction",),
    "magnitude": ("latent magnitude m", RMS, "Length of a token's value; the paper reads it as confidence."),
    "magnitude_std": ("latent magnitude, spread over tokens", RMS),
    "magnitude_max": ("largest latent magnitude", RMS),
    "magnitude_loss_correlation": ("correlation of log m with the token's loss", "", "Below 0 if m is confidence."),
    "magnitude_correlation": ("correlation of log m with attention received", "", "Above 0 if m attracts attention."),
    "delta_m": ("radial update Δm", RMS, "How the block changes the magnitude."),
    "delta_m_relative": ("relative radial update Δm/m",),
    "delta_m_negative": ("share of tokens with Δm < 0",),
    "tangency_latent": ("cosine of update and latent state", "", "0: the update only turns the state."),
    "tangency_attention": ("cosine of attention's step and the stream", "", "0: the step only turns the stream."),
    "tangency_ffn": ("cosine of the feed-forward's step and the stream", "", "0: the step only turns the stream."),
    "angular_step_latent": ("angular step of the latent state", "rad", "How far attention turns the values."),
    "angular_step_attention": ("angular step by attention", "rad", "How far attention turns the stream."),
    "angular_step_ffn": ("angular step by the feed-forward", "rad", "How far the feed-forward turns the stream."),
    "resultant_length": ("mean resultant length", "", "1: all attended values agree in direction; 0: they cancel."),
    "spectral_mass": ("share of the value's squared size", "", "Each head's share of the value's squared norm."),
    "resistance_slope": ("slope of log angle on log m", "", "−1 if large magnitudes resist turning (the paper)."),
    "resistance_r2": ("R² of log angle on log m",),
    "log_kappa": ("log κ", "", "κ: the precision of a token at a given lag, before its content is compared."),
    "log_kappa_tilde": ("log κ̃", "", "κ with the query's own noise added: how sharply contents are compared."),
    "log_evidence": ("log-evidence", "nats", "Log of the sum of weights: a head's confidence. Compare within a block."),
    "log_evidence_std": ("log-evidence, spread over tokens", "nats"),
    "log_evidence_spread": ("log-evidence, spread over heads", "nats", "What an evidence-weighted projection can use."),
    "log_evidence_slope": ("slope of log-evidence on log position", "", "1 if every new token adds full evidence."),
    "kept_of_the_past": ("kept of the past, λ", "", "Forget gate: the share of earlier evidence that a token keeps."),
    "gate": ("consensus gate g", "", "Below 1: values are damped where they disagree; below 0: their sign is flipped."),
    "gate_negative_share": ("attention on values with flipped sign (g < 0)", ""),
    "log_prior_precision": ("log P⁻, precision from the layer before", "nats"),
    "log_posterior_precision": ("log P⁺, precision for the next layer", "nats"),
    "fusion_step": ("step α", "", "Step from the head's own direction (0) to the estimate (1)."),
    "robust_weight": ("robust weight w", "", "Weight after comparing contents: 1 agrees, 0 is rejected."),
    "robust_weight_self": ("robust weight of the token itself",),
    "outlier_share": ("share of outliers", "", "Pairs whose distance exceeds the scale of the robust weight."),
    "weight": ("attention weight",),
    "entropy": ("attention entropy", "nats", "0: one token; log n: n tokens equally."),
    "effective_tokens": ("effective number of tokens attended", "", "Exponential of the entropy."),
    "mass_first": ("attention on the first token", "", "The usual attention sink."),
    "mass_self": ("attention on the token itself",),
    "mass_largest": ("attention on the largest-magnitude token",),
    "mean_lag": ("mean lag", "tokens", "How far back attention looks on average."),
    "self_similarity": ("cosine of v̄ with the token's own value", "", "Similarity bias, before the projection."),
    "removed_share": ("share removed by the projection", "", "Squared norm removed, as a share of the estimate's."),
    "consensus_epsilon": ("local-consensus ε", "", "Mean distance of attended directions from the token's own."),
    "consensus_broken": ("share of tokens with ε > 0.5", "", "The paper's first-order theory does not apply to them."),
    "m_inf": ("m∞", RMS, "Information floor: what a distant or small token still counts."),
    "mu": ("μ", "per token", "Rate at which information decays with distance."),
    "radius": ("radius", "", "Size of queries and keys: a temperature."),
    "nu_t": ("ν t", "", "Directional tail: small ν rejects outliers, large ν is Gaussian."),
    "mu_r": ("μ r", "", "Decay of magnitudes in the radial channel, per token."),
    "nu_r": ("ν r", "", "Radial tail: small ν rejects outliers, large ν is Gaussian."),
    "eta_tk": ("η tk", "", "Noise of a key's direction, a deviation."),
    "eta_tq": ("η tq", "", "Noise of a query's direction, a deviation."),
    "eta_rk": ("η rk", "", "Noise of a key's magnitude, a deviation."),
    "eta_rq": ("η rq", "", "Noise of a query's magnitude, a deviation."),
    "sigma_t0": ("σ t0", "", "Floor of the directional noise, a deviation."),
    "sigma_r0": ("σ r0", "", "Floor of the radial noise, a deviation."),
    "sigma_process": ("σ process", "", "Noise that a state accumulates per token, a deviation."),
    "alpha": ("α", "", "Step along the tangent."),
    "beta": ("β", "", "Step along the radius."),
    "tau": ("τ", "", "Temperature of the exponential kernel."),
}
QUANTITIES = {name: Quantity(*words) for name, words in _WORDS.items()}
_GREEK = {"nu": "ν", "eta": "η", "sigma": "σ", "mu": "μ", "alpha": "α", "beta": "β", "tau": "τ", "omega": "ω"}


def quantity_named(name: str) -> Quantity:
    """The quantity behind a probe's name such as `precision/log_evidence`."""
    last = name.rpartition("/")[2]
    if last in QUANTITIES:
        return QUANTITIES[last]
    head, _, rest = last.partition("_")
    if head in _GREEK:  # eta_tk → η tk
        return Quantity(f"{_GREEK[head]} {rest}".strip())
    return Quantity(re.sub(r"[_/]+", " ", last))
