"""What every name of the probe means (docs/diagnostics.md), one formula each over the naive forward.

A formula gets a layer of `naive.forward` and gives a number or one number per head; None where the block has none.
"""

import numpy as np

from tests.diagnostics.naive import joined, rms, unit

LAGS = (0, 1, 2, 3, 4, 6)  # 2^n and 3·2^n up to three quarters of the test's sequences of 9 tokens
STILL = 1e-6  # a step this small against its state is rounding: its direction and angle are not defined


def cos(a, b):
    return np.clip((unit(a) * unit(b)).sum(-1), -1, 1)


def tangency(state, step):
    moved = np.linalg.norm(step, axis=-1) > STILL * np.linalg.norm(state, axis=-1)
    return cos(state[moved], step[moved]).mean()


def angle(a, b):
    return np.arccos(cos(a, b))


def slope(x, y):
    return np.polyfit(x.ravel(), y.ravel(), 1)[0]


def correlation(x, y):
    return np.corrcoef(x.ravel(), y.ravel())[0, 1]


def of_heads(x):  # mean over (B, T, H)
    return x.mean((0, 1))


def of_queries(x):  # mean over (B, H, T)
    return x.mean((0, 2))


def per_head(function, x):  # of (B, T, H)
    return np.array([function(x[..., h]) for h in range(x.shape[-1])])


# The latent state x = mV, its step, and the two growths of it.
def state(s):
    return s.m[..., None] * s.direction


def moved(s):
    return state(s) + joined(s.update) + joined(s.radial_update + np.zeros_like(s.v))


def predicted(s):
    return (s.direction * joined(s.alpha * s.estimate)).mean(-1)


def latent_growth(s):
    return rms(moved(s)) - s.m


def stream_growth(s):
    return rms(s.mid) - rms(s.z)


def resistance(s):
    turn = angle(state(s), moved(s))
    return np.log(s.m[turn > STILL]), np.log(turn[turn > STILL])


# Attention.
def weights(s):
    return np.nan_to_num(s.A)


def entropy(s):
    a = s.A / np.nansum(s.A, -1, keepdims=True)
    return -np.nansum(np.where(a > 0, a * np.log(np.where(a > 0, a, 1)), 0), -1)


def epsilon(s):
    return np.nansum(s.A * s.distance, -1)


def mass_largest(s):
    mass = []
    for b, t in np.ndindex(s.m.shape):
        seen = s.m[b, : t + 1]
        mass.append(s.A[b, :, t, : t + 1][:, seen > seen.max() * (1 - 1e-5)].sum(-1))  # twins count together
    return np.mean(mass, axis=0)


def mean_lag(s):
    index = np.arange(s.A.shape[-1])
    return of_queries((weights(s) * (index[:, None] - index)).sum(-1))


def removed_share(s):
    projection = s.alpha * s.estimate
    removed = ((projection - s.update) ** 2).sum((0, 1, 3)) / (projection**2).sum((0, 1, 3))
    return removed if removed.max() > 0 else None


def resultant_length(s):
    attended = np.einsum("bhij,bjh->bih", weights(s), np.linalg.norm(s.v, axis=-1))
    return of_heads(np.linalg.norm(s.estimate, axis=-1) / attended)


def spectral_mass(s):
    square = (s.v**2).sum(-1)
    return of_heads(square / square.sum(-1, keepdims=True))


def magnitude_correlation(s):
    received = np.nanmean(s.A, axis=2)  # (B, H, T): by those who can see the token
    return np.array([correlation(np.log(s.m), received[:, h]) for h in range(received.shape[1])])


# Precision.
def evidence_slope(s):
    in_view = np.broadcast_to(np.log(np.arange(1, s.m.shape[1] + 1)), s.m.shape)
    return per_head(lambda evidence: slope(in_view, evidence), s.evidence)


def filters(formula):
    """Only for blocks with robust weights."""
    return lambda s: None if np.isnan(s.w).all() else formula(s)


def outlier_share(s):
    nu = s.p["nu_t" if "nu_t" in s.p else "nu"][:, None, None]
    distance = s.w ** (-1 / (nu + 1)) - 1  # x/ν
    return np.nanmean(np.where(np.isnan(s.w), np.nan, distance > 1), axis=(0, 2, 3))


def radial(formula):
    """Only for blocks that estimate the magnitude."""
    return lambda s: None if s.delta_m is None else formula(s)


LAYERS = {
    "radial/growth": lambda s: (rms(s.out) - rms(s.z)).mean(),
    "radial/growth_attention": lambda s: stream_growth(s).mean(),
    "radial/growth_ffn": lambda s: (rms(s.out) - rms(s.mid)).mean(),
    "radial/growth_predicted": lambda s: predicted(s).mean(),
    "radial/growth_latent": lambda s: latent_growth(s).mean(),
    "radial/growth_latent_unprojected": lambda s: (rms(state(s) + joined(s.alpha * s.estimate)) - s.m).mean(),
    "radial/growth_slope": lambda s: slope(predicted(s), stream_growth(s)),
    "radial/growth_r2": lambda s: correlation(predicted(s), stream_growth(s)) ** 2,
    "radial/growth_latent_slope": lambda s: slope(predicted(s), latent_growth(s)),
    "radial/growth_latent_r2": lambda s: correlation(predicted(s), latent_growth(s)) ** 2,
    "radial/magnitude": lambda s: s.m.mean(),
    "radial/magnitude_std": lambda s: s.m.std(ddof=1),
    "radial/magnitude_max": lambda s: s.m.max(),
    "radial/delta_m": radial(lambda s: s.delta_m.mean()),
    "radial/delta_m_relative": radial(lambda s: (s.delta_m / s.m).mean()),
    "radial/delta_m_negative": radial(lambda s: (s.delta_m < -STILL * s.m).mean()),
    "radial/tangency_latent": lambda s: tangency(state(s), joined(s.update)),
    "radial/tangency_attention": lambda s: tangency(s.z, s.mid - s.z),
    "radial/tangency_ffn": lambda s: tangency(s.mid, s.out - s.mid),
    "radial/angular_step_latent": lambda s: angle(state(s), moved(s)).mean(),
    "radial/angular_step_attention": lambda s: angle(s.z, s.mid).mean(),
    "radial/angular_step_ffn": lambda s: angle(s.mid, s.out).mean(),
    "radial/resistance_slope": lambda s: slope(*resistance(s)),
    "radial/resistance_r2": lambda s: correlation(*resistance(s)) ** 2,
    "radial/resultant_length": resultant_length,
    "radial/spectral_mass": spectral_mass,
    "radial/magnitude_loss_correlation": lambda s: correlation(np.log(s.m[:, :-1]), s.loss),
    "precision/log_evidence": lambda s: of_heads(s.evidence),
    "precision/log_evidence_std": lambda s: per_head(lambda evidence: evidence.std(ddof=1), s.evidence),
    "precision/log_evidence_slope": evidence_slope,
    "precision/log_evidence_spread": lambda s: s.evidence.std(-1, ddof=1).mean(),
    "precision/kept_of_the_past": lambda s: None if (s.kept == 1).all() else s.kept.mean((0, 1)),
    "precision/robust_weight": filters(lambda s: np.nanmean(s.w, axis=(0, 2, 3))),
    "precision/robust_weight_self": filters(lambda s: of_queries(np.diagonal(s.w, axis1=2, axis2=3))),
    "precision/outlier_share": filters(outlier_share),
    "attention/entropy": lambda s: of_queries(entropy(s)),
    "attention/effective_tokens": lambda s: of_queries(np.exp(entropy(s))),
    "attention/mass_first": lambda s: of_queries(s.A[..., 0]),
    "attention/mass_self": lambda s: of_queries(np.diagonal(s.A, axis1=2, axis2=3)),
    "attention/mass_largest": mass_largest,
    "attention/mean_lag": mean_lag,
    "attention/magnitude_correlation": magnitude_correlation,
    "attention/self_similarity": lambda s: of_heads(cos(s.estimate, s.v)),
    "attention/removed_share": removed_share,
    "attention/consensus_epsilon": lambda s: of_queries(epsilon(s)),
    "attention/consensus_broken": lambda s: of_queries(epsilon(s) > 0.5),
}
DEPTHS = {  # of the residual stream between layers
    "radial/residual_rms": lambda z: rms(z).mean(),
    "radial/residual_rms_std": lambda z: rms(z).std(ddof=1),
    "radial/residual_rms_p99": lambda z: np.quantile(rms(z), 0.99),
    "radial/residual_rms_first": lambda z: rms(z[:, 0]).mean(),
}
PROFILES = {"attention/weight": "A", "precision/log_kappa": "log_kappa", "precision/log_kappa_tilde": "log_kappa_tilde"}
# RFA's scalars carry the names of the directional channel, so that the blocks lie side by side.
RFA_NAMES = {"nu": "nu_t", "eta_q": "eta_tq", "eta_k": "eta_tk", "sigma_0": "sigma_t0"}


def expected_values(layers, loss):
    """{name: [layer] or [layer][head]} of everything a probe of this forward pass must hold."""
    for s in layers:
        s.loss = loss
    values_by_name = {name: [formula(s) for s in layers] for name, formula in LAYERS.items()}
    values_by_name = {name: values for name, values in values_by_name.items() if values[0] is not None}
    for name in layers[0].p:
        values_by_name[f"parameters/{RFA_NAMES.get(name, name)}"] = [s.p[name] for s in layers]
    stream = [s.z for s in layers] + [layers[-1].out]
    return values_by_name | {name: [formula(z) for z in stream] for name, formula in DEPTHS.items()}


def expected_profiles(layers):
    """{name: [layer][head][lag]}: means over the pairs at each lag."""
    profiles = {}
    for name, pairs in PROFILES.items():
        if not np.isnan(getattr(layers[0], pairs)).all():
            diagonals = [[of_queries(np.diagonal(getattr(s, pairs), -lag, 2, 3)) for lag in LAGS] for s in layers]
            profiles[name] = np.moveaxis(np.array(diagonals), 1, 2)
    return profiles
