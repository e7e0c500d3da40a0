"""Polar's attention in plain loops and float64, from the paper (Algorithm 1, Appendices C and D) and its errata.

Nothing of the package is used: complex numbers instead of rotary tables, one pair of tokens at a time, natural formulas
instead of logarithms, numpy instead of torch. Slow on purpose. `weights` holds the matrices and gains of one layer,
`p` its scalars (deviations, not variances), `s` the switches of the yaml.
"""

from __future__ import annotations

import math

import numpy as np

CAP = 1e4  # largest precision of a residual
FLOOR = 1e-6  # smallest magnitude in a precision


def polar_attention(x, weights, p, s, *, heads, groups, base=10000.0, documents=None):
    """What one sequence x (T, d) gets from the layer, (T, d); `documents` are T ids."""
    tokens = len(x)
    documents = np.zeros(tokens, int) if documents is None else documents
    times = [t - next(i for i in range(tokens) if documents[i] == documents[t]) for t in range(tokens)]
    q, k, v, m = zip(*(project(z, weights, p, s, heads, groups) for z in x))
    size = len(v[0][0])
    speeds = frequencies(s, weights, groups, size, base)
    of = [h // (heads // groups) for h in range(heads)]  # key head of a query head
    q_turned = [[turn(q[t][h], speeds[of[h]], times[t]) for h in range(heads)] for t in range(tokens)]
    k_turned = [[turn(k[t][g], speeds[g], times[t]) for g in range(groups)] for t in range(tokens)]
    v_turned = [[turn(v[t][g], speeds[g] * s["rotate_values"], times[t]) for g in range(groups)] for t in range(tokens)]

    out = []
    for i in range(tokens):
        past = [j for j in range(i + 1) if documents[j] == documents[i]]
        for _ in range(s["irls_steps"] - 1):  # what the keys agree on takes the query's place
            for h in range(heads):
                w, _ = weigh(logits(h, i, past, q_turned[i][h], k_turned, of, m, p, s))
                mean = sum(a * k_turned[j][of[h]] for a, j in zip(w, past))
                q_turned[i][h] = mean / rms(mean) * p["radius"] * math.sqrt(0.5)
        means, evidence, directional = [], [], []
        for h in range(heads):
            w, log_total = weigh(logits(h, i, past, q_turned[i][h], k_turned, of, m, p, s))
            mean = sum(a * v_turned[j][of[h]] for a, j in zip(w, past))
            means.append(turn(mean, speeds[of[h]] * s["rotate_values"], -times[i]))
            evidence.append(log_total)
            directional.append(w)
        own = [v[i][of[h]] for h in range(heads)]
        delta_m = 0.0
        if s["radial"] != "none":
            correlation = [cosine(s["radial_correlation"], i, j, q_turned, k_turned, v_turned, of) for j in past]
            delta_m = radial(i, past, correlation, directional, m, p, s) - m[i]
        out.append(weights["out"] @ step(own, means, evidence, m[i], delta_m, p, s))
    return np.array(out)


def project(z, weights, p, s, heads, groups):
    """Step 1: directions q (heads, ·), k, v (groups, ·) and magnitude m of one token."""
    m = None
    if s["norm_position"] == "post":
        z = p["gain"] * z
    if s["norm_position"] == "pre":
        m, z = p["gain"] * rms(z), z / rms(z)
    v = weights["v"] @ z
    m = rms(v) if m is None else m
    v = v / rms(v) if s["norm_values"] else v
    size = len(v) // groups
    if s["kernel"] == "gaussian":
        return np.zeros((heads, size)), np.zeros((groups, size)), v.reshape(groups, size), m
    q, k = np.split(weights["qk"] @ z, [heads * size])
    radius = p["radius"] * math.sqrt(0.5)  # per real channel: |q|^2 = radius^2 Dh/2
    if s["norm_position"] == "pre":
        q, k = q * p["radius"], k * p["radius"]
    elif s["norm_scope"] == "global":
        q, k = q / rms(q) * radius, k / rms(k) * radius
    q, k = q.reshape(heads, size), k.reshape(groups, size)
    if s["norm_position"] != "pre" and s["norm_scope"] == "per_head":
        q, k = (np.array([part / rms(part) * radius for part in parts]) for parts in (q, k))
    if s["norm_gain"] == "channel":
        q, k = q * weights["q_gain"], k * weights["k_gain"]
    return q, k, v.reshape(groups, size), m


def frequencies(s, weights, groups, size, base):
    """Angle per token of every complex mode, (groups, size/2)."""
    if s["frequencies"] == "learned":
        return np.exp(weights["log_frequency"])
    if s["frequencies"] == "per_head":  # one bank over all heads, slow heads first
        bank = [base ** (-n / (groups * size // 2)) for n in range(groups * size // 2)]
        bank = np.exp(np.log(bank[::-1]).astype(np.float32).astype(float))  # kept as single-precision logarithms
        return bank.reshape(groups, size // 2)
    return np.array([[base ** (-2 * n / size) for n in range(size // 2)]] * groups)


def turn(vector, speed, time):
    half = len(vector) // 2
    modes = (vector[:half] + 1j * vector[half:]) * np.exp(1j * speed * time)
    return np.concatenate([modes.real, modes.imag])


def logits(h, i, past, query, k_turned, of, m, p, s):
    """log(w kappa) of every visible key."""
    values = []
    for j in past:
        decay2 = math.exp(-2 * p["mu"][h] * (i - j))
        magnitude = max(m[j], FLOOR) if s["magnitude"] == "own" else 1.0
        information = magnitude**2 * decay2 + p["m_inf"] ** 2
        variance = p["eta_tk"][h] ** 2 * decay2 + p["sigma_t0"][h] ** 2
        kappa = information / variance
        key = k_turned[j][of[h]]
        if s["kernel"] == "gaussian":
            values.append(math.log(kappa))
            continue
        kappa_tilde = min(information / (variance + p["eta_tq"][h] ** 2), CAP)
        residual = -2 * query @ key if s["residual_form"] == "dot" else ((query - key) ** 2).sum()
        distance = kappa_tilde * residual / (len(query) / 2)
        if s["kernel"] == "student":
            nu = p["nu_t"][h]
            values.append(math.log(kappa) - (nu + 1) * math.log(1 + distance / nu))
        else:
            values.append(math.log(kappa) - distance / p["tau"][h])
    return values


def weigh(logits_of_row):
    """Weights that sum to one, and the logarithm of their sum before: the evidence."""
    top = max(logits_of_row)
    w = [math.exp(z - top) for z in logits_of_row]
    return [a / sum(w) for a in w], top + math.log(sum(w))


def cosine(kind, i, j, q, k, v, of):
    """c_ij over all heads together."""
    if kind == "one":
        return 1.0
    if kind == "vv":
        a, b = np.concatenate(v[i]), np.concatenate(v[j])
        return a @ b / len(a)
    a, b = np.concatenate(q[i]), np.concatenate([k[j][g] for g in of])
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def radial(i, past, correlation, directional, m, p, s):
    """The consensus magnitude of what the others' have become on their way."""
    carried = [m[j] * math.exp(-p.get("mu_r", 0.0) * (i - j)) for j in past]
    if s["radial"] == "shared":
        weights = [sum(head[n] for head in directional) / len(directional) for n in range(len(past))]
    else:
        nu, weights = p["nu_r"], []
        for c, predicted, j in zip(correlation, carried, past):
            variance = p["eta_rk"] ** 2 * math.exp(-2 * p.get("mu_r", 0.0) * (i - j)) + p["sigma_r0"] ** 2
            surprise = (c * predicted - m[i]) ** 2 / (variance + p["eta_rq"] ** 2)
            weights.append((1 + surprise / nu) ** -(nu + 1) / variance)
    return sum(w * c * predicted for w, c, predicted in zip(weights, correlation, carried)) / sum(weights)


def step(own, means, evidence, m, delta_m, p, s):
    """Step 7: the latent step of all heads, (D,)."""
    v, mean = np.concatenate(own), np.concatenate(means)
    delta = [b - a for a, b in zip(own, means)]
    if s["projection"] == "none":
        tangent = mean
    elif s["projection"] == "per_head":
        tangent = np.concatenate([b - (a @ b) / (a @ a) * a for a, b in zip(own, means)])
    elif s["projection"] == "global":
        tangent = mean - (v @ mean) / (v @ v) * v
    else:  # Proposition 5
        counted = [math.exp(max(e - max(evidence), -s["evidence_clamp"])) for e in evidence]  # in units of the largest
        along = sum(a @ d for a, d in zip(own, delta))
        scale = sum((a @ a) / e for a, e in zip(own, counted))
        tangent = np.concatenate([d - along / (e * scale) * a for a, d, e in zip(own, delta, counted)])
    angular = p["alpha"] / m if s["alpha_over_m"] else p["alpha"]
    change = p.get("beta", 0.0) * delta_m
    if s["retract"] == "none":
        return m * angular * tangent + change * v
    radius = np.linalg.norm(v)
    if s["retract"] == "norm":
        turned = v + angular * tangent
        turned = turned / np.linalg.norm(turned) * radius
    else:
        if s["retract"] == "geodesic":  # towards the mean, as far as its length is to the radius
            part = mean - (v @ mean) / radius**2 * v
            angle = math.atan2(np.linalg.norm(part), v @ mean / radius)
            way = angular * min(np.linalg.norm(mean) / radius, 1.0) * angle
            direction = part / max(np.linalg.norm(part), 1e-300)
        else:
            length = np.linalg.norm(tangent)
            way, direction = angular * length / radius, tangent / max(length, 1e-300)
        turned = math.cos(way) * v + math.sin(way) * radius * direction
    return (m + change) * turned - m * v


def rms(x):
    return math.sqrt((x**2).mean())
