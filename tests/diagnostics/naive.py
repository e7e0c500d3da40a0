"""What the probe should find, recomputed from the weights alone: float64, one query at a time, no code shared with it.

Only the forward hooks' view of the residual stream and of each mixer's input is taken from the model.
"""

import math

import numpy as np
import torch

from polarlm.attention import PolarAttention, RobustFilterAttention, StandardAttention


def capture(model, tokens):
    """(input, middle, output) of every block and the input of its mixer, as float64 arrays (B, T, d)."""
    seen = {}

    def keep(name, position):
        def hook(module, inputs, output):
            seen[name] = (inputs[0] if position == "in" else output).detach().double().numpy()

        return hook

    hooks = []
    for i, block in enumerate(model.blocks):
        hooks.append(block.register_forward_hook(keep(f"z{i}", "in")))
        hooks.append(block.register_forward_hook(keep(f"out{i}", "out")))
        hooks.append(block.mixer.register_forward_hook(keep(f"x{i}", "in")))
        hooks.append(block.mixer.register_forward_hook(keep(f"mixed{i}", "out")))
    with torch.no_grad():
        model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return [
        {"z": seen[f"z{i}"], "mid": seen[f"z{i}"] + seen[f"mixed{i}"], "out": seen[f"out{i}"], "x": seen[f"x{i}"]}
        for i in range(len(model.blocks))
    ]


def rms(x):
    return np.sqrt((x**2).mean(-1))


def turn(x, position, base):
    """RoPE of one vector (Dh,): modes are (k, k + Dh/2)."""
    half = len(x) // 2
    w = base ** (-np.arange(half) * 2 / len(x))
    c = (x[:half] + 1j * x[half:]) * np.exp(1j * w * position)
    return np.concatenate([c.real, c.imag])


def heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)  # (B, T, count, Dh)


def qkv(mixer, x):
    """q (B, T, H, Dh), k, v (B, T, G, Dh) as the block uses them, and m (B, T) or None."""
    s = mixer.shape
    if isinstance(mixer, PolarAttention):
        qk = x @ weight(mixer.qk).T
        q, k = np.split(qk, [s.n_head * s.head_dim], axis=-1)
        q, k, v = heads(q, s.n_head), heads(k, s.n_kv_head), x @ weight(mixer.v).T
        q, k = (p / rms(p)[..., None] * math.sqrt(0.5) for p in (q, k))
        m = rms(v)
        return q, k, heads(v / m[..., None], s.n_kv_head), m
    sizes = np.cumsum([s.n_head * s.head_dim, s.n_kv_head * s.head_dim])
    q, k, v = np.split(x @ weight(mixer.qkv).T, sizes, axis=-1)
    q, k, v = heads(q, s.n_head), heads(k, s.n_kv_head), heads(v, s.n_kv_head)
    if isinstance(mixer, RobustFilterAttention):
        q, k = (p / np.sqrt((p**2).mean(-1, keepdims=True) + s.norm_eps) * math.sqrt(0.5) for p in (q, k))
    return q, k, v, None


def weight(linear):
    return linear.weight.detach().double().numpy()


def scalars(mixer):
    return {name: np.asarray(value.detach().double()) for name, value in mixer.estimator.read().items()}


def logit(mixer, p, h, q, k, m_j, lag):
    """(logit, log κ, log κ̃, w) of one pair of head h; q and k already turned."""
    if isinstance(mixer, StandardAttention):
        return q @ k / math.sqrt(len(q)), None, None, None
    polar = isinstance(mixer, PolarAttention)
    names = ("nu_t", "eta_tk", "eta_tq", "sigma_t0") if polar else ("nu", "eta_k", "eta_q", "sigma_0")
    nu, eta_k, eta_q, sigma = (p[name][h] for name in names)
    e = math.exp(-p["mu"][h] * lag)
    numerator = m_j**2 * e**2 + p["m_inf"] ** 2 if polar else 1.0
    variance = eta_k**2 * e**2 + sigma**2 + (0.0 if polar else p["sigma_process"][h] ** 2 * (1 - e**2))
    kappa, kappa_q = numerator / variance, numerator / (variance + eta_q**2)
    moved = k if polar else e * k
    x = kappa_q * ((q - moved) ** 2).sum() / (len(q) / 2)
    w = (1 + x / nu) ** -(nu + 1)
    return math.log(kappa * w), math.log(kappa), math.log(kappa_q), w


def layer(model, number, seen):
    """Every quantity of one layer by brute force: dict of arrays, per token (B, T), per head (B, T, H) or pairs."""
    mixer, c = model.blocks[number].mixer, model.config
    q, k, v, m = qkv(mixer, seen["x"])
    batch, tokens, count = q.shape[:3]
    group = count // k.shape[2]
    p = {} if isinstance(mixer, StandardAttention) else scalars(mixer)
    names = ("A", "log_kappa", "log_kappa_tilde", "w", "distance")
    pairs = {name: np.full((batch, count, tokens, tokens), np.nan) for name in names}
    estimate, evidence = np.zeros_like(q), np.zeros((batch, tokens, count))
    for b in range(batch):
        for h in range(count):
            for i in range(tokens):
                rows = [
                    logit(mixer, p, h, turn(q[b, i, h], i, c.rope_base), turn(k[b, j, h // group], j, c.rope_base),
                          None if m is None else m[b, j], i - j)
                    for j in range(i + 1)
                ]  # fmt: skip
                logits = np.array([row[0] for row in rows])
                evidence[b, i, h] = np.log(np.exp(logits).sum())
                a = np.exp(logits - evidence[b, i, h])
                pairs["A"][b, h, i, : i + 1] = a
                for n, name in enumerate(("log_kappa", "log_kappa_tilde", "w"), start=1):
                    if rows[0][n] is not None:
                        pairs[name][b, h, i, : i + 1] = [row[n] for row in rows]
                for j in range(i + 1):
                    seen_value = v[b, j, h // group]
                    if mixer.rotate_values:
                        seen_value = turn(seen_value, j - i, c.rope_base)
                    decay = math.exp(-p["mu"][h] * (i - j)) if isinstance(mixer, RobustFilterAttention) else 1.0
                    estimate[b, i, h] += a[j] * decay * seen_value
                    mine = v[b, i, h // group]
                    cos = mine @ seen_value / np.linalg.norm(mine) / np.linalg.norm(seen_value)
                    pairs["distance"][b, h, i, j] = math.sqrt(max(0.0, 2 - 2 * cos))
    return {"v": np.repeat(v, group, axis=2), "m": m, "estimate": estimate, "evidence": evidence, "p": p, **pairs}
