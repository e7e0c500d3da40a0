"""Bugs in the paper's mathematics."""

# ruff: noqa: E501
# fmt: off

from tools.mutants.mutant import mutants

G = "polarlm/geometry/"
T = "tests/geometry/"

MUTANTS = [
    *mutants(
        f"{G}precision.py",
        f"{T}test_log_precision.py {T}test_bridge_to_attention.py",
        ("log_m2 = 2 * magnitude", "log_m2 = magnitude", "κ grows with m instead of m²"),
        ("torch.logaddexp(log_m2 - 2 * mu * lag,", "torch.logaddexp(log_m2 - mu * lag,", "information decays half as fast"),
        ("variance = log_variance(lag, mu, eta_k2, sigma02 + eta_q2, process2)", "variance = log_variance(lag, mu, eta_k2, sigma02, process2)", "κ̃ forgets the query's noise"),
        ("floor2 = floor2 - process2 * torch", "floor2 = floor2 + process2 * torch", "process noise takes variance away"),
        ("log_or_minus_infinity(eta_k2, lag) - 2 * mu * lag, log", "log_or_minus_infinity(eta_k2, lag), log", "the key's variance does not decay"),
        ("return near - (log_or_minus_infinity(m_inf2) - log", "return near - (log_or_minus_infinity(m_inf2) + log", "depth of the prior with the floor's sign turned"),
        ("    return -log_variance(lag, mu, eta_k2, sigma02 + eta_q2)", "    return -log_variance(lag, mu, eta_k2, sigma02)", "ρ̃ forgets the query's noise"),
    ),
    *mutants(
        f"{G}robust.py",
        f"{T}test_influence.py",
        ("return -((nu + dim) / dim) * torch", "return -(nu / dim) * torch", "Student-t without its + d"),
        ("return student_log_weight(s, nu_t * dim, dim)", "return student_log_weight(s, nu_t, dim)", "ν_t not scaled by the dimension"),
        ("return -s / (tau * dim)", "return -s / dim", "the exponential kernel ignores τ"),
        ("return -dim * torch.expm1(-(nu / dim)", "return -dim * torch.expm1(-(dim / nu)", "the Student penalty with its exponent turned over"),
        ("return power_law_log_weight(s, nu_t * dim, 1.0)", "return power_law_log_weight(s, nu_t * dim, 2.0)", "the likelihood's weight squared"),
    ),
    *mutants(
        f"{G}robust.py",
        f"{T}test_influence.py {T}test_rt_filter.py",
        ("logits = logits.masked_fill(~allowed, float(\"-inf\"))", "logits = logits", "the future is not masked"),
        (".tril(keys - queries)", ".tril(keys - queries - 1)", "a token does not see itself"),
    ),
    *mutants(
        f"{G}sphere.py",
        f"{T}test_sphere.py",
        ("return u * ((u * x).sum(-1, keepdim=True) / _squared_norm(u))", "return u * (u * x).sum(-1, keepdim=True)", "the projector without 1/‖u‖² (E6)"),
        ("return u * angle.cos() + step * torch.sinc(angle / torch.pi)", "return u * angle.cos() + step * torch.sinc(angle)", "Exp with sinc's factor π forgotten"),
        ("    angle = length / radius\n", "    angle = length\n", "Exp ignores the radius"),
        ("return exp_map(u, alpha * concentration * log_map(u, mean))", "return exp_map(u, alpha * log_map(u, mean))", "the geodesic step ignores how much directions agree"),
        ("(torch.linalg.vector_norm(mean, dim=-1, keepdim=True) / _norm(u)).clamp_max(1.0)", "torch.linalg.vector_norm(mean, dim=-1, keepdim=True).clamp_max(1.0)", "the geodesic step is wrong off the unit sphere"),
        ("arc = ((1 - fraction) * angle).sin()", "arc = (1 - fraction) * angle.sin()", "slerp interpolates linearly"),
        ("return normalise(u + step, _norm(u))", "return normalise(u + step)", "retraction to the unit sphere"),
    ),
    *mutants(
        f"{G}polar.py",
        f"{T}test_polar_coordinates.py",
        ("radius = math.sqrt(x.shape[-1]) if", "radius = 1.0 if", "the magnitude is a norm, not an RMS (E4)"),
        ("beta * d_magnitude, alpha * d_direction)", "alpha * d_magnitude, beta * d_direction)", "α and β exchanged"),
        ("+ magnitude.unsqueeze(-1) * d_direction", "+ d_direction", "the tangent step is not scaled by m"),
    ),
    *mutants(
        f"{G}multihead.py",
        f"{T}test_multihead_update.py",
        ("along = (_dot(v, v_bar) - squared_radius).sum(-2, keepdim=True)", "along = _dot(v, v_bar).sum(-2, keepdim=True)", "ū in place of δ in Proposition 5 (E15)"),
        ("logits = floored.log() - log_evidence", "logits = floored.log() + log_evidence", "heads with much evidence pay for tangency"),
        ("squared_radius = _dot(v, v).sum(-2, keepdim=True)", "squared_radius = _dot(v, v)", "the global projection divides by a head's radius"),
        ("return torch.addcmul(v_bar, v, _dot(v, v_bar) / _floor(_dot(v, v)), value=-1)", "return torch.addcmul(v_bar, v, _dot(v, v_bar) / _floor(_dot(v, v)), value=-0.5)", "half of the component along v stays"),
    ),
    *mutants(
        f"{G}transport.py",
        f"{T}test_transport.py",
        ("torch.arange(0, dim, 2, device=device).to(dtype) / dim", "torch.arange(0, dim, 2, device=device).to(dtype) / (dim - 2)", "frequencies of another RoPE"),
        ("cat((real * cos - imag * sin, imag * cos + real * sin)", "cat((real * cos + imag * sin, imag * cos + real * sin)", "not a rotation"),
        ("return rotate(weights @ rotate(values, cos, sin), cos, sin, inverse=True)", "return rotate(weights @ rotate(values, cos, sin), cos, sin)", "values are not rotated back"),
        ("torch.exp(-mu * lag).unsqueeze(-1)", "torch.exp(mu * lag).unsqueeze(-1)", "states grow instead of decaying"),
    ),
    *mutants(
        f"{G}covariance.py",
        f"{T}test_rt_covariance.py",
        ("return variance * torch.exp(-2.0 * mu * lag)", "return variance * torch.exp(-mu * lag)", "variances decay like amplitudes"),
        ("(trace - radial) / (u.shape[-1] - 1)", "(trace - radial) / u.shape[-1]", "the tangent space with one dimension too many"),
        ("block[:size, :size] = dynamics\n", "block[:size, :size] = -dynamics\n", "the Lyapunov integral runs backwards"),
    ),
    *mutants(
        f"{G}likelihood.py",
        f"{T}test_rt_likelihood.py",
        ("(1.0 - alignment2)).sum()", "(1.0 - alignment2.sqrt())).sum()", "1 − c in place of 1 − c²"),
        ("return (weights * cosine * magnitude).sum(-1)", "return (weights * magnitude).sum(-1)", "the consensus magnitude ignores disagreement"),
        (".clamp_min(0.0)  # rounding", ".clamp_min(-1.0)  # rounding", "a squared distance may be negative"),
    ),
]
