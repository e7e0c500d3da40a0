"""A second GPT, written to be checked by eye: float64 numpy, one query at a time, no code shared with polarlm.

Only the weights are taken from the model. `forward` returns what every layer saw, for `expected.py` to reduce.
Arrays: tokens (B, T), vectors per head (B, T, H, Dh), pairs (B, H, T, T) with NaN where a query cannot see a key.
"""

import math
from types import SimpleNamespace

import numpy as np

from polarlm.attention import ExclusiveAttention, PolarAttention, RobustFilterAttention, StandardAttention

PAIRS = ("A", "log_kappa", "log_kappa_tilde", "w", "distance")


def forward(model, tokens):
    """(layers, loss): what each layer saw, and the loss (B, T - 1) of predicting each next token, in nats."""
    tokens = tokens.numpy()
    z, layers = weight(model.embedding)[tokens], []
    for block in model.blocks:
        seen = attend(block.mixer, normalised(block.mixer_norm, z), model.config.rope_base)
        step = joined(seen.update + seen.radial_update) @ weight(block.mixer.out).T
        if block.tangent[0]:
            step = step - z * (z * step).sum(-1, keepdims=True) / (z**2).sum(-1, keepdims=True)
        mid = z + step
        out = mid + swiglu(block.feed_forward, normalised(block.ffn_norm, mid))
        seen.z, seen.mid, seen.out = z, mid, out
        layers.append(seen)
        z = out
    logits = normalised(model.norm, z) @ weight(model.head).T
    picked = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return layers, np.log(np.exp(logits[:, :-1]).sum(-1)) - picked


def attend(mixer, x, base):
    """One mixer: A, v̄, evidence, the directional update, and the radial one where there is one."""
    q, k, v, m = queries_keys_values(mixer, x)
    batch, tokens, heads = q.shape[:3]
    group = heads // k.shape[2]
    v = np.repeat(v, group, axis=2)  # grouped heads: every query head has its own copy
    p = scalars(mixer)
    seen = SimpleNamespace(v=v, p=p, estimate=np.zeros_like(q), evidence=np.zeros((batch, tokens, heads)))
    for name in PAIRS:
        setattr(seen, name, np.full((batch, heads, tokens, tokens), np.nan))
    seen.kept = kept_of_the_past(mixer, x)
    for b, i, h in np.ndindex(batch, tokens, heads):
        past = range(i + 1)
        query = turned(q[b, i, h], i, base)
        rows = [logit(mixer, p, h, query, turned(k[b, j, h // group], j, base), m[b, j], i - j) for j in past]
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        columns["logit"] += [math.log(seen.kept[b, j + 1 : i + 1, h].prod()) for j in past]
        evidence = np.log(np.exp(columns["logit"]).sum())
        a = np.exp(columns["logit"] - evidence)
        # The others' values as this token sees them: turned into its frame where the block transports values.
        others = np.stack([turned(v[b, j, h], j - i, base) if mixer.rotate_values else v[b, j, h] for j in past])
        decay = np.array([math.exp(-p["mu"][h] * (i - j)) if decays(mixer) else 1.0 for j in past])
        seen.estimate[b, i, h] = (a * decay) @ others
        seen.evidence[b, i, h] = evidence
        seen.A[b, h, i, : i + 1] = a * decay
        seen.distance[b, h, i, : i + 1] = np.linalg.norm(unit(v[b, i, h]) - unit(others), axis=-1)
        for name in ("log_kappa", "log_kappa_tilde", "w"):
            if name in columns:
                getattr(seen, name)[b, h, i, : i + 1] = columns[name]
    seen.m = m
    seen.direction = joined(v) / rms(joined(v))[..., None]
    seen.alpha = p.get("alpha", 1.0)
    seen.update = seen.alpha * projected(mixer, v, seen.estimate, seen.evidence)
    seen.delta_m = radial_step(mixer, p, v, m, base) if "beta" in p else None
    seen.radial_update = 0.0 if seen.delta_m is None else p["beta"] * seen.delta_m[..., None, None] * v
    return seen


def kept_of_the_past(mixer, x):
    """What every token leaves of the past to every head, (B, T, H)."""
    if mixer.forget is None:
        return np.ones((*x.shape[:2], mixer.shape.n_head))
    gate = x @ mixer.forget.weight.detach().double().numpy().T + mixer.forget.offset.detach().double().numpy()
    return 1 / (1 + np.exp(-gate))


def queries_keys_values(mixer, x):
    """q (B, T, H, Dh), k, v (B, T, G, Dh) as the block uses them, and m (B, T)."""
    s = mixer.shape
    sizes = np.cumsum([s.n_head * s.head_dim, s.n_kv_head * s.head_dim])
    if isinstance(mixer, PolarAttention):
        q, k = np.split(x @ weight(mixer.qk).T, sizes[:1], axis=-1)
        v = x @ weight(mixer.v).T
        m = rms(v)  # splits off the magnitude; the direction has channel RMS 1
        v = split(v / m[..., None], s.n_kv_head)
    else:
        q, k, v = np.split(x @ weight(mixer.qkv).T, sizes, axis=-1)
        v = split(v, s.n_kv_head)
        m = rms(joined(np.repeat(v, s.n_head // s.n_kv_head, axis=2)))
    q, k = split(q, s.n_head), split(k, s.n_kv_head)
    if not isinstance(mixer, StandardAttention):  # on the sphere ‖q‖² = Dh/2
        q, k = (part / rms(part)[..., None] * math.sqrt(0.5) for part in (q, k))
    return q, k, v, m


def logit(mixer, p, h, q, k, m_j, lag):
    """One pair of head h; q and k already turned."""
    if isinstance(mixer, StandardAttention):
        return {"logit": q @ k / math.sqrt(len(q))}
    polar = isinstance(mixer, PolarAttention)
    names = ("nu_t", "eta_tk", "eta_tq", "sigma_t0") if polar else ("nu", "eta_k", "eta_q", "sigma_0")
    nu, eta_k, eta_q, sigma = (p[name][h] for name in names)
    e = math.exp(-p["mu"][h] * lag)
    numerator = m_j**2 * e**2 + p["m_inf"] ** 2 if polar else 1.0
    mu = p["mu"][h]
    gathered = (1 - e**2) / (2 * mu) if mu > 0 else lag  # a head without decay diffuses freely
    variance = eta_k**2 * e**2 + sigma**2 + (0.0 if polar else p["sigma_process"][h] ** 2 * gathered)
    kappa, kappa_q = numerator / variance, numerator / (variance + eta_q**2)
    x = kappa_q * ((q - (k if polar else e * k)) ** 2).sum() / (len(q) / 2)
    w = (1 + x / nu) ** -(nu + 1)
    return {"logit": math.log(kappa * w), "log_kappa": math.log(kappa), "log_kappa_tilde": math.log(kappa_q), "w": w}


def projected(mixer, v, estimate, evidence):
    """What leaves the heads (B, T, H, Dh): the projected step and the radial one."""
    projection = mixer.parts.step.projection if isinstance(mixer, PolarAttention) else None
    if isinstance(mixer, ExclusiveAttention) or projection == "per_head":
        return estimate - ((v * estimate).sum(-1) / (v**2).sum(-1))[..., None] * v
    if projection is None:
        return estimate
    if projection == "global":
        return estimate - ((v * estimate).sum((-1, -2)) / (v**2).sum((-1, -2)))[..., None, None] * v
    assert projection == "evidence"
    delta = estimate - v
    along = (v * delta).sum((-1, -2))[..., None]
    share = along * np.exp(-evidence) / ((v**2).sum(-1) * np.exp(-evidence)).sum(-1, keepdims=True)
    return delta - share[..., None] * v


def radial_step(mixer, p, v, m, base):
    """Δm (B, T): Appendix C's radial estimate with weights of its own."""
    out = np.zeros_like(m)
    for b, i in np.ndindex(m.shape):
        turns = [np.stack([turned(x, j - i, base) for x in v[b, j]]) for j in range(i + 1)]
        moved = np.array([(v[b, i] * turns[j]).mean() * m[b, j] for j in range(i + 1)])
        d2 = (moved - m[b, i]) ** 2 / (p["eta_rk"] ** 2 + p["eta_rq"] ** 2 + p["sigma_r0"] ** 2)
        w = (1 + d2 / p["nu_r"]) ** -(p["nu_r"] + 1)
        out[b, i] = (w * moved).sum() / w.sum() - m[b, i]
    return out


def scalars(mixer):
    """The filter's numbers: softplus of what is learned."""
    if isinstance(mixer, StandardAttention):
        return {}
    values = {}
    for name, parameter in mixer.estimator.items():
        value = np.where(parameter.live.numpy(), np.log1p(np.exp(double(parameter.raw))), 0.0)
        values[name] = value.reshape(tuple(parameter.shape))
    return values


def decays(mixer):
    return isinstance(mixer, RobustFilterAttention)


def turned(x, position, base):
    """RoPE of one vector (Dh,): modes are (k, k + Dh/2)."""
    half = len(x) // 2
    w = base ** (-np.arange(half) * 2 / len(x))
    c = (x[:half] + 1j * x[half:]) * np.exp(1j * w * position)
    return np.concatenate([c.real, c.imag])


def swiglu(feed_forward, x):
    gate, up = np.split(x @ weight(feed_forward.gate_up).T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ weight(feed_forward.down).T


def normalised(norm, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * double(norm.weight)


def double(tensor):
    return tensor.detach().double().numpy()


def weight(module):
    return double(module.weight)


def rms(x):
    return np.sqrt((x**2).mean(-1))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def split(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)  # (B, T, heads, Dh)


def joined(x):
    return x.reshape(*x.shape[:-2], -1)  # (B, T, D)
