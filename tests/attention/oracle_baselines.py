"""The baselines in plain loops and float64: soft-max attention, XSA (Zhai 2026) and RFA (Appendix A of the paper).

Nothing of the package is used: complex numbers instead of rotary tables, one pair of tokens at a time, natural formulas
instead of logarithms. `weights` holds the matrices and gains of one layer, `p` RFA's scalars (deviations, not
variances), `s` the switches of the yaml.
"""

from __future__ import annotations

import math

import numpy as np

CAP = 1e4  # largest precision of a residual


def attend(x, weights, s, logit, share, combine, *, heads, groups, base, documents, first_values):
    """One sequence x (T, d) through a layer, from logit(h, lag, q, k) of turned vectors and a value's share(h, lag)."""
    tokens, size = len(x), len(weights["qkv"]) // (heads + 2 * groups)
    times = [t - next(i for i in range(tokens) if documents[i] == documents[t]) for t in range(tokens)]
    speeds = frequencies(s["frequencies"], weights, groups, size, base)
    rows = [np.split(weights["qkv"] @ z, [heads * size, (heads + groups) * size]) for z in x]
    q, k, v = ([row[part].reshape(-1, size) for row in rows] for part in range(3))
    if s["value_residual"] and first_values is not None:
        part = weights["share"]
        v = [(1 - part) * own + part * first for own, first in zip(v, first_values)]
    out = []
    for i in range(tokens):
        past = [j for j in range(i + 1) if documents[j] == documents[i]]
        updates = []
        for h in range(heads):
            g = h // (heads // groups)
            query = turn(normed(q[i][h], "q", weights, s), speeds[g], times[i])
            keys = [turn(normed(k[j][g], "k", weights, s), speeds[g], times[j]) for j in past]
            scores = np.array([logit(h, i - j, query, key) for j, key in zip(past, keys)])
            a = np.exp(scores - scores.max())
            a /= a.sum()
            # What others say, carried from their place to this one.
            said = [turn(v[j][g], speeds[g] * s["rotate_values"], times[j] - times[i]) for j in past]
            mean = sum(w * share(h, i - j) * value for w, j, value in zip(a, past, said))
            update = combine(real(mean), v[i][g])
            if s["head_gate"]:
                update = update * 2 / (1 + math.exp(-weights["gate"][h] @ x[i]))
            updates.append(update)
        out.append(weights["out"] @ np.concatenate(updates))
    return np.array(out)


def standard_attention(x, weights, s, **shape):
    """softmax(<q, k>/sqrt(Dh)) v; with `exclusive`, what a head brings back loses its part along the own value."""
    size = len(weights["qkv"]) // (shape["heads"] + 2 * shape["groups"])

    def logit(h, lag, q, k):
        return (q.conj() @ k).real / math.sqrt(size)

    def exclusive(update, own):
        return update - (update @ own) / (own @ own) * own if s["exclusive"] else update

    return attend(x, weights, s, logit, lambda h, lag: 1.0, exclusive, **shape)


def robust_filter_attention(x, weights, p, s, **shape):
    """L = log P - (nu + 1) log(1 + P~ |q - E k|^2/(nu d)), v_bar = sum A E v, P = 1/Sigma, P~ = 1/(Sigma + eta_q^2)."""

    def decay(h, lag):
        return math.exp(-p["mu"][h] * lag)

    def variance(h, lag):
        mu, sigma = p["mu"][h], p["sigma_process"][h]
        gathered = sigma**2 * lag if mu == 0 else sigma**2 * (1 - math.exp(-2 * mu * lag)) / (2 * mu)
        return gathered + (decay(h, lag) * p["eta_k"][h]) ** 2 + p["sigma_0"][h] ** 2

    def logit(h, lag, q, k):
        precision = 1 / variance(h, lag)
        if s["kernel"] == "gaussian":
            return math.log(precision)
        residual = q - (decay(h, lag) if s["decay_keys"] else 1.0) * k
        tilde = min(1 / (variance(h, lag) + p["eta_q"][h] ** 2), CAP)
        distance = tilde * (abs(residual) ** 2).sum() / len(q)  # d counts complex modes
        if s["kernel"] == "exponential":
            return math.log(precision) - distance / p["tau"][h]
        power = 1 if s["kernel"] == "student_mle" else p["nu"][h] + 1
        return math.log(precision) - power * math.log(1 + distance / p["nu"][h])

    def share(h, lag):
        return decay(h, lag) if s["decay_values"] else 1.0

    return attend(x, weights, s, logit, share, lambda update, own: update, **shape)


def normed(vector, name, weights, s):
    """QK-norm: RMS 1 and a gain per channel; RFA's is a fixed radius, half a unit per real channel."""
    if not s["qk_norm"]:
        return vector
    if f"{name}_norm" in weights:
        return vector / math.sqrt((vector**2).mean() + 1e-6) * weights[f"{name}_norm"]
    return vector / math.sqrt((vector**2).mean()) * math.sqrt(0.5)


def frequencies(kind, weights, groups, size, base):
    """Angles per token of every key head's modes."""
    if kind == "learned":
        return np.exp(weights["log_frequency"])
    if kind == "per_head":  # one spectrum of all heads' modes, cut from slow to fast
        modes = groups * size // 2
        bank = np.log(base ** (-np.arange(modes) / modes))[::-1]
        return np.exp(bank.astype(np.float32).astype(float)).reshape(groups, -1)  # kept as fp32 logarithms
    return np.tile(base ** (-np.arange(size // 2) / (size // 2)), (groups, 1))


def turn(vector, speeds, time):
    """The complex modes of a real vector, turned by e^{i w t}."""
    half = len(vector) // 2
    return (vector[:half] + 1j * vector[half:]) * np.exp(1j * speeds * time)


def real(modes):
    return np.concatenate([modes.real, modes.imag])
