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
NORM = 1e-6  # added to a mean square by RMSNorm
ROOT = 1e-12  # added to a mean square, so that the zero vector has a direction (N5 in docs/theory.md)


def polar_attention(x, weights, p, s, *, heads, groups, base=10000.0, documents=None, before=None, first_values=None):
    """What one sequence x (T, d) gets from the layer, (T, d); `documents` are T ids, `before` is log P+ (T, heads).

    `first_values` are the first layer's W_v z, (T, D).
    """
    tokens = len(x)
    documents = np.zeros(tokens, int) if documents is None else documents
    times = [t - next(i for i in range(tokens) if documents[i] == documents[t]) for t in range(tokens)]
    first_values = [None] * tokens if first_values is None else first_values
    z, q, k, v, m = zip(*(project(z, first, weights, p, s, heads, groups) for z, first in zip(x, first_values)))
    size = len(v[0][0])
    speeds = frequencies(s, weights, groups, size, base)
    of = [h // (heads // groups) for h in range(heads)]  # key head of a query head
    U = frames(z, times, weights, s, speeds)
    still = np.eye(size // 2)
    V = U if s["rotate_values"] else [[still] * groups] * tokens
    q_turned = [[move(U[t][of[h]].conj().T, q[t][h]) for h in range(heads)] for t in range(tokens)]
    k_turned = [[move(U[t][g].conj().T, k[t][g]) for g in range(groups)] for t in range(tokens)]
    v_turned = [[move(V[t][g].conj().T, v[t][g]) for g in range(groups)] for t in range(tokens)]

    prior = None
    if s["uncertainty"] == "carry":  # G.3: P- = 1/(a/P+ + b), of every token and head
        prior = 1 / (p["relax_a"] / np.exp(before) + p["relax_b"])

    kept = [gate(stream, weights, s, heads) for stream in x]
    out = []
    for i in range(tokens):
        past = [j for j in range(i + 1) if documents[j] == documents[i]]
        for _ in range(s["irls_steps"] - 1):  # what the keys agree on takes the query's place
            for h in range(heads):
                w, _ = weigh(logits(h, i, past, q_turned[i][h], k_turned, of, m, p, s, prior, kept))
                if s["consensus"] != "none":
                    keys = [k_turned[j][of[h]] for j in past]
                    w = [a * g for a, g in zip(w, gates(h, i, past, q_turned[i][h], keys, m, p, s, "qk"))]
                mean = sum(times_complex(a, k_turned[j][of[h]]) for a, j in zip(w, past))
                q_turned[i][h] = mean / rms(mean) * p["radius"] * math.sqrt(0.5)
        means, evidence, directional = [], [], []
        for h in range(heads):
            w, log_total = weigh(logits(h, i, past, q_turned[i][h], k_turned, of, m, p, s, prior, kept))
            directional.append(w)
            here = v_turned[i][of[h]]
            if s["consensus"] != "none":  # v + sum A (g v_j - Re g v)
                kind = s["radial_correlation"]
                of_head = k_turned if kind == "qk" else v_turned
                others = [of_head[j][of[h]] for j in past]
                first = q_turned[i][h] if kind == "qk" else here
                w = [a * g for a, g in zip(w, gates(h, i, past, first, others, m, p, s, kind))]
            mean = here + sum(times_complex(a, v_turned[j][of[h]]) - a.real * here for a, j in zip(w, past))
            if prior is not None:  # covariance intersection
                share = p["prior_share"][h]
                attended = (1 - share) * math.exp(log_total) * (times[i] + 1) ** -p["context_power"][h]
                together = share * prior[i, h] + attended
                mean, log_total = here + attended / together * (mean - here), math.log(together)
            means.append(move(V[i][of[h]], mean))
            evidence.append(log_total)
        own = [v[i][of[h]] for h in range(heads)]
        delta_m = 0.0
        if s["radial"] != "none":
            correlation = [cosine(s["radial_correlation"], i, j, q_turned, k_turned, v_turned, of) for j in past]
            delta_m = radial(i, past, correlation, directional, m, p, s) - m[i]
        taken = step(own, means, evidence, m[i], delta_m, p, s)
        if s["head_gate"]:
            taken = np.repeat(2 / (1 + np.exp(-weights["head_gate"] @ normed(x[i], s))), size) * taken
        if s["tie_output"]:  # the mean over the query heads of a value head, through W_v transposed
            taken = taken.reshape(groups, heads // groups, size).mean(1).flatten()
        out.append((weights["v"].T if s["tie_output"] else weights["out"]) @ taken)
    return np.array(out)


def project(z, first, weights, p, s, heads, groups):
    """Step 1: the stream z as it is projected, directions q (heads, ·), k, v (groups, ·), magnitude m of one token."""
    m = None
    if s["norm_position"] == "post":
        z = p["gain"] * z
    if s["norm_position"] == "pre":
        m, z = p["gain"] * rms(z), z / rms(z)
    v = weights["v"] @ z
    if s["value_residual"]:
        v = (1 - weights["value_residual.share"]) * v + weights["value_residual.share"] * first
    m = rms(v) if m is None else m
    v = v / rms(v) if s["norm_values"] else v
    size = len(v) // groups
    if s["kernel"] == "gaussian":
        return z, np.zeros((heads, size)), np.zeros((groups, size)), v.reshape(groups, size), m
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
    return z, q, k, v.reshape(groups, size), m


def normed(x, s):
    """The stream of a token as gates see it."""
    return x if s["norm_position"] == "both" else x / math.sqrt((x**2).mean() + NORM)


def gate(x, weights, s, heads):
    """How much of the past a token leaves to every head."""
    if s["forgetting"] == "none":
        return np.ones(heads)
    said = weights["forget"] @ normed(x, s) if s["forgetting"] == "content" else 0.0
    return 1 / (1 + np.exp(-(said + weights["forget.offset"])))


def frequencies(s, weights, groups, size, base):
    """Angle per token of every complex mode, (groups, size/2)."""
    if s["frequencies"] == "learned":
        return np.exp(weights["log_frequency"])
    if s["frequencies"] == "per_head":  # one bank over all heads, slow heads first
        bank = [base ** (-n / (groups * size // 2)) for n in range(groups * size // 2)]
        bank = np.exp(np.log(bank[::-1]).astype(np.float32).astype(float))  # kept as single-precision logarithms
        return bank.reshape(groups, size // 2)
    return np.array([[base ** (-2 * n / size) for n in range(size // 2)]] * groups)


def frames(z, times, weights, s, speeds):
    """U_t = R_t ... R_1 of every key head, complex matrices [t][g]: G.2, latest step on the left, anew per document.

    RoPE's sign: it is the common frame that is reached with exp(+i w t), so a step turns by exp(-i w).
    """
    products = []
    for t, stream in enumerate(z):
        products.append([])
        for g, speed in enumerate(speeds):
            modes = len(speed)
            phases, correction = speed, np.eye(modes)
            if s["transport"] == "phases":
                phases = speed + (weights["transport.angles"] @ stream).reshape(len(speeds), modes)[g]
            if s["transport"] == "unitary":
                axis = (weights["transport.axes"] @ stream).reshape(len(speeds), 2 * modes)[g]
                axis = (axis[:modes] + 1j * axis[modes:]) / np.linalg.norm(axis)
                angle = (weights["transport.angles"] @ stream)[g]
                correction = np.eye(modes) + (np.exp(1j * angle) - 1) * np.outer(axis, axis.conj())
            step = np.diag(np.exp(-1j * phases)) @ correction
            products[t].append(step @ products[t - 1][g] if times[t] else np.eye(modes))
    return products


def move(matrix, vector):
    half = len(vector) // 2
    modes = matrix @ (vector[:half] + 1j * vector[half:])
    return np.concatenate([modes.real, modes.imag])


def carried(m, mu, lag, p):
    """The magnitude m after a lag: decayed, or on its way to the equilibrium."""
    rest = p.get("m_eq", 0.0)
    return rest + (m - rest) * math.exp(-mu * lag)


def logits(h, i, past, query, k_turned, of, m, p, s, prior, kept):
    """log(w kappa) of every visible key, kappa times what the tokens after the key have left of it."""
    values = []
    for j in past:
        decay2 = math.exp(-2 * p["mu"][h] * (i - j))
        magnitude = max(m[j], FLOOR) if s["magnitude"] == "own" else 1.0
        information = carried(magnitude, p["mu"][h], i - j, p) ** 2 + p["m_inf"] ** 2
        variance = p["eta_tk"][h] ** 2 * decay2 + p["sigma_t0"][h] ** 2
        of_key = 0.0 if prior is None else p.get("widen_k", np.zeros(9))[h] / prior[j, h]
        kappa = 1 / (variance / information + of_key) * math.prod(kept[t][h] for t in range(j + 1, i + 1))
        key = k_turned[j][of[h]]
        if s["kernel"] == "gaussian":
            values.append(math.log(kappa))
            continue
        of_query = 0.0 if prior is None else p.get("widen_q", np.zeros(9))[h] / prior[i, h]
        kappa_tilde = min(1 / ((variance + p["eta_tq"][h] ** 2) / information + of_key + of_query), CAP)
        residual = -2 * query @ key if s["residual_form"] == "dot" else ((query - key) ** 2).sum()
        if s["consensus"] != "none":
            radius2 = np.linalg.norm(query) * np.linalg.norm(key)
            residual = radius2 * (1 - abs(product(key, query, s) / radius2) ** 2)
        distance = kappa_tilde * residual / (len(query) / 2)
        if s["kernel"] == "student":
            nu = p["nu_t"][h]
            values.append(math.log(kappa) - (nu + 1) * math.log(1 + distance / nu))
        elif s["kernel"] == "student_mle":
            values.append(math.log(kappa) - math.log(1 + distance / p["nu_t"][h]))
        else:
            values.append(math.log(kappa) - distance / p["tau"][h])
    return values


def product(a, b, s):
    """a†b, or its real part."""
    half = len(a) // 2
    z = (a[:half] + 1j * a[half:]).conj() @ (b[:half] + 1j * b[half:])
    return z if s["consensus"] == "complex" else z.real


def gates(h, i, past, own, others, m, p, s, kind):
    """g of every visible token: G.1 over the kappa with its floors; correlations are those of own and others."""
    g = []
    for other, j in zip(others, past):
        lag, mu, mu_r = i - j, p["mu"][h], p.get("mu_r", 0.0)
        here, there = (max(m[t], FLOOR) if s["magnitude"] == "own" else 1.0 for t in (i, j))
        there = carried(there, mu, lag, p)
        tau = 1 / (p["eta_tk"][h] ** 2 * math.exp(-2 * mu * lag) + p["sigma_t0"][h] ** 2)
        rho = 1 / (p["eta_rk"] ** 2 * math.exp(-2 * mu_r * lag) + p["sigma_r0"] ** 2)
        c = 1.0 if kind == "one" else product(other, own, s) / (np.linalg.norm(own) * np.linalg.norm(other))
        g.append((rho * here * there + (tau - rho) * there**2 * c) / ((there**2 + p["m_inf"] ** 2) * tau))
    return g


def times_complex(factor, vector):
    half = len(vector) // 2
    z = factor * (vector[:half] + 1j * vector[half:])
    return np.concatenate([z.real, z.imag])


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
    arrived = [carried(m[j], p.get("mu_r", 0.0), i - j, p) for j in past]
    if s["radial"] == "shared":
        weights = [sum(head[n] for head in directional) / len(directional) for n in range(len(past))]
    else:
        nu, weights = p["nu_r"], []
        for c, predicted, j in zip(correlation, arrived, past):
            variance = p["eta_rk"] ** 2 * math.exp(-2 * p.get("mu_r", 0.0) * (i - j)) + p["sigma_r0"] ** 2
            surprise = (c * predicted - m[i]) ** 2 / (variance + p["eta_rq"] ** 2)
            weights.append((1 + surprise / nu) ** -(nu + 1) / variance)
    return sum(w * c * predicted for w, c, predicted in zip(weights, correlation, arrived)) / sum(weights)


def step(own, means, evidence, m, delta_m, p, s):
    """Step 7: the latent step of all heads, (D,)."""
    v, mean = np.concatenate(own), np.concatenate(means)
    delta = [b - a for a, b in zip(own, means)]
    if s["projector"] == "complex" and s["projection"] != "none":
        tangent = complex_projection(own, means, delta, evidence, s)
    elif s["projection"] == "none":
        tangent = mean
    elif s["projection"] == "per_head":
        tangent = np.concatenate([b - (a @ b) / (a @ a) * a for a, b in zip(own, means)])
    elif s["projection"] == "global":
        tangent = mean - (v @ mean) / (v @ v) * v
    else:  # Proposition 5
        shares = inverse_evidence(evidence, s)
        along = sum(a @ d for a, d in zip(own, delta))
        scale = sum((a @ a) * share for a, share in zip(own, shares))
        tangent = np.concatenate([d - along * share / scale * a for a, d, share in zip(own, delta, shares)])
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


def inverse_evidence(evidence, s):
    """1/P of every head in units of the largest; no P is smaller beside the surest than the clamp allows."""
    clamp = math.inf if s["evidence_clamp"] is None else s["evidence_clamp"]
    counted = [max(e, max(evidence) - clamp) for e in evidence]
    return [math.exp(min(counted) - e) for e in counted]


def complex_projection(own, means, delta, evidence, s):
    """The same three projections with v†Δ = 0 instead of its real part."""
    a, b, d = ([x[: len(x) // 2] + 1j * x[len(x) // 2 :] for x in xs] for xs in (own, means, delta))
    squared = [np.vdot(x, x).real for x in a]
    if s["projection"] == "per_head":
        modes = [y - np.vdot(x, y) / r * x for x, y, r in zip(a, b, squared)]
    elif s["projection"] == "global":
        along = sum(np.vdot(x, y) for x, y in zip(a, b)) / sum(squared)
        modes = [y - along * x for x, y in zip(a, b)]
    else:
        shares = inverse_evidence(evidence, s)
        along = sum(np.vdot(x, y) for x, y in zip(a, d)) / sum(r * share for r, share in zip(squared, shares))
        modes = [y - along * share * x for x, y, share in zip(a, d, shares)]
    return np.concatenate([np.concatenate([z.real, z.imag]) for z in modes])


def rms(x):
    return math.sqrt((x**2).mean() + ROOT)
