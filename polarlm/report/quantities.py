"""How the probe's quantities are called on the page; an unknown name is shown as it is: a new probe needs no edit."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """Title and unit of a probed quantity, for an axis."""

    title: str
    unit: str = ""

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


# The last part of the name decides; the part before the slash (radial, precision, …) is the section of the page.
QUANTITIES = {
    "residual_rms": Quantity("residual RMS"),
    "residual_rms_std": Quantity("residual RMS, spread over tokens"),
    "residual_rms_p99": Quantity("residual RMS, 99th percentile"),
    "residual_rms_first": Quantity("residual RMS of the first token"),
    "growth": Quantity("growth of the residual RMS", "RMS units"),
    "growth_attention": Quantity("growth of the stream by attention", "RMS units"),
    "growth_ffn": Quantity("growth of the stream by the feed-forward", "RMS units"),
    "growth_predicted": Quantity("predicted growth α⟨v, v̄⟩/r²", "RMS units"),
    "growth_latent": Quantity("growth of the latent state", "RMS units"),
    "growth_latent_unprojected": Quantity("growth of the latent state without projection", "RMS units"),
    "growth_slope": Quantity("slope of the stream's growth on the prediction"),
    "growth_r2": Quantity("R² of the stream's growth on the prediction"),
    "growth_latent_slope": Quantity("slope of latent growth on the prediction"),
    "growth_latent_r2": Quantity("R² of latent growth on the prediction"),
    "magnitude": Quantity("latent magnitude m", "RMS units"),
    "magnitude_std": Quantity("latent magnitude, spread over tokens", "RMS units"),
    "magnitude_max": Quantity("largest latent magnitude", "RMS units"),
    "magnitude_loss_correlation": Quantity("correlation of log m with the token's loss"),
    "magnitude_correlation": Quantity("correlation of log m with attention received"),
    "delta_m": Quantity("radial update Δm", "RMS units"),
    "delta_m_relative": Quantity("relative radial update Δm/m"),
    "delta_m_negative": Quantity("share of tokens with Δm < 0"),
    "tangency_latent": Quantity("cosine of update and latent state"),
    "tangency_attention": Quantity("cosine of attention's step and the stream"),
    "tangency_ffn": Quantity("cosine of the feed-forward's step and the stream"),
    "angular_step_latent": Quantity("angular step of the latent state", "rad"),
    "angular_step_attention": Quantity("angular step by attention", "rad"),
    "angular_step_ffn": Quantity("angular step by the feed-forward", "rad"),
    "resultant_length": Quantity("mean resultant length"),
    "spectral_mass": Quantity("share of the value's squared size"),
    "resistance_slope": Quantity("slope of log angle on log m"),
    "resistance_r2": Quantity("R² of log angle on log m"),
    "log_kappa": Quantity("log κ"),
    "log_kappa_tilde": Quantity("log κ̃"),
    "log_evidence": Quantity("log-evidence", "nats"),
    "log_evidence_std": Quantity("log-evidence, spread over tokens", "nats"),
    "log_evidence_spread": Quantity("log-evidence, spread over heads", "nats"),
    "log_evidence_slope": Quantity("slope of log-evidence on log position"),
    "robust_weight": Quantity("robust weight w"),
    "robust_weight_self": Quantity("robust weight of the token itself"),
    "outlier_share": Quantity("share of outliers"),
    "weight": Quantity("attention weight"),
    "entropy": Quantity("attention entropy", "nats"),
    "effective_tokens": Quantity("effective number of tokens attended"),
    "mass_first": Quantity("attention on the first token"),
    "mass_self": Quantity("attention on the token itself"),
    "mass_largest": Quantity("attention on the largest-magnitude token"),
    "mean_lag": Quantity("mean lag", "tokens"),
    "self_similarity": Quantity("cosine of v̄ with the token's own value"),
    "removed_share": Quantity("share removed by the projection"),
    "consensus_epsilon": Quantity("local-consensus ε"),
    "consensus_broken": Quantity("share of tokens with ε > 0.5"),
    "m_inf": Quantity("m∞", "RMS units"),
    "mu": Quantity("μ", "per token"),
    "radius": Quantity("radius"),
}
_GREEK = {"nu": "ν", "eta": "η", "sigma": "σ", "mu": "μ", "alpha": "α", "beta": "β", "tau": "τ", "omega": "ω"}


def describe(name: str) -> Quantity:
    """The quantity behind a probe's name such as `precision/log_evidence`."""
    last = name.rpartition("/")[2]
    if last in QUANTITIES:
        return QUANTITIES[last]
    head, _, rest = last.partition("_")
    if head in _GREEK:  # eta_tk → η tk
        return Quantity(f"{_GREEK[head]} {rest}".strip())
    return Quantity(re.sub(r"[_/]+", " ", last))
