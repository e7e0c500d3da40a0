"""Bugs in the mixers and in robust attention."""

# ruff: noqa: E501
# fmt: off
from tools.mutants.mutant import mutants

A = "polarlm/attention/"
K = f"{A}kernels/"
T = "tests/attention/"
BRIDGE = "tests/geometry/test_bridge_to_attention.py"
CONTRACT = "tests/contract/test_block_contract.py"
DECODING = f"{CONTRACT}::test_cached_decoding_equals_the_full_forward"
RECORD = f"{CONTRACT}::test_record_shows_the_same_pass"

MUTANTS = [
    *mutants(
        f"{K}reference.py",
        f"{BRIDGE} {T}test_limits.py",
        ("kappa_tilde = kappa_tilde.clamp_max(math.log(MAX_QUERY_PRECISION))", "kappa_tilde = kappa_tilde", "κ̃ is not capped"),
        ("residual = (squared + residual).clamp_min(0)", "residual = (squared + residual / 2).clamp_min(0)", "half of the cross term"),
        ("logits = kappa - (shape + 1) * torch.log1p(x / shape)", "logits = kappa - shape * torch.log1p(x / shape)", "Student-t exponent ν instead of ν + 1"),
        ("logits = kappa - (shape + 1) * torch.log1p(x / shape)", "logits = -(shape + 1) * torch.log1p(x / shape)", "log κ is left out of the logits"),
        ("key_decay = E if call.decay_keys else 1.0", "key_decay = 1.0", "RFA's keys do not decay"),
        ("x = kappa_tilde.exp() * residual / call.half", "x = kappa_tilde.exp() * residual / (2 * call.half)", "the residual is divided by real instead of complex channels"),
        ("v_bar = (applied * E if call.decay_values else applied) @ v_heads", "v_bar = applied @ v_heads", "RFA's values do not decay"),
    ),
    *mutants(
        f"{K}reference.py",
        f"{T}test_oracle.py {T}test_polar.py {BRIDGE}",
        ("(predicted - m[:, -T:, None]).square()", "(predicted - m[:, None, :]).square()", "the radial residual is taken against the key's magnitude (E3)"),
        ("- (nu + 1) * torch.log1p(d2 / nu)", "- torch.log1p(d2 / nu)", "the radial logit without ν_r + 1 (E1)"),
        ("radial_weights = weights.mean(1)", "radial_weights = weights[:, 0]", "shared radial weights of one head only"),
        ("return (radial_weights * predicted).sum(-1), radial_weights", "return (radial_weights * m[:, None, :]).sum(-1), radial_weights", "m̄ without the correlation"),
    ),
    *mutants(
        f"{K}reference.py",
        f"{T}kernels/test_dropout.py",
        ("    applied = F.dropout(weights, call.dropout)\n", "    weights = applied = F.dropout(weights, call.dropout)\n", "dropout leaks into the weights that are handed out"),
        ("    applied = F.dropout(weights, call.dropout)\n", "    applied = weights * (torch.rand_like(weights) >= call.dropout)\n", "dropout without its factor 1/(1−p)"),
    ),
    *mutants(
        "polarlm/geometry/precision.py",
        f"{T}kernels/test_native.py::test_capped_precision_has_the_reference_gradient tests/geometry/test_log_precision.py {T}test_polar.py {T}test_oracle.py",
        ("MAX_QUERY_PRECISION = 1e4", "MAX_QUERY_PRECISION = 50.0", "κ̃ capped at 50 instead of 10⁴"),
    ),
    *mutants(
        f"{K}streaming.py",
        f"{T}kernels/test_streaming.py {T}kernels/test_dropout.py",
        ("seen = keys - queries + stop", "seen = stop", "with a cache a chunk sees the wrong keys"),
        ("preserve_rng_state=call.dropout > 0", "preserve_rng_state=False", "the backward pass drops other weights than the forward pass"),
    ),
    *mutants(
        f"{K}native/call.h",
        f"{T}kernels/test_dropout.py",
        ("T(0) : T(1 / (1 - c.dropout))", "T(0) : T(1)", "dropout of the fused path is not scaled"),
        ("uint64_t(query + lane + 1)", "uint64_t(lane + 1)", "dropout of the fused path has one mask for all chunks of queries"),
        ("uint64_t((batch * c.heads + head) * c.keys + key + 1)", "uint64_t(head * c.keys + key + 1)", "dropout of the fused path has one mask for all rows of a batch"),
    ),
    *mutants(
        f"{K}native/pairs.h",
        f"{T}kernels/test_native.py::test_every_switch_in_float64",
        ("exponent = T(s + 1)", "exponent = T(s)", "native Student-t exponent ν instead of ν + 1"),
        ("p.capped = smaller(p.free, all<T>(head.cap))", "p.capped = p.free", "native κ̃ is not capped"),
    ),
    *mutants(
        f"{K}call.py",
        f"{T}test_oracle.py {T}kernels/test_streaming.py",
        ("@ v.mT / v.shape[-1]", "@ v.mT / self.v.shape[-1]", "⟨v_i, v_j⟩ over a head's size instead of D (E2)"),
        ("return self.q.shape[3] / 2", "return self.q.shape[3]", "d_h counts real channels"),
    ),
    *mutants(
        f"{K}noise.py",
        f"{T}kernels/test_native.py",
        ("NOISE_ROWS = (\"mu\", \"eta_k2\", \"eta_q2\"", "NOISE_ROWS = (\"mu\", \"eta_q2\", \"eta_k2\"", "key and query noise exchanged on the way to the operators"),
    ),
    *mutants(
        f"{A}estimator.py",
        f"{T}test_polar.py {T}test_limits.py",
        ("NOISE_SPLIT = {\"k\": 0.4, \"q\": 0.4, \"0\": 0.2}", "NOISE_SPLIT = {\"k\": 0.2, \"q\": 0.4, \"0\": 0.4}", "the shares of matched noise for key and floor are exchanged"),
        ("return value + torch.log(-torch.expm1(-value))", "return value", "initial values without the inverse soft-plus (N6)"),
        ("x = nu * torch.expm1(target / (nu + 1)) if", "x = nu * torch.expm1(target / nu) if", "noise matched to another logit range"),
        ("zeros = max(1, round(ZERO_SHARE * heads))", "zeros = 0", "no head is free of decay"),
        ("rates[zeros:] * 10**fraction", "rates[zeros:]", "decay rates are not spread over the heads"),
    ),
    *mutants(
        f"{A}polar.py",
        f"{T}test_polar.py {T}test_oracle.py",
        ("delta_m = output.m_bar - m\n", "delta_m = output.m_bar\n", "the radial step is m̄ instead of m̄ − m"),
        ("magnitude=m_seen if self.magnitude else torch.ones_like(m_seen)", "magnitude=m_seen", "magnitude=unit is ignored"),
        ("radius = parameters[\"radius\"] * 0.5**0.5", "radius = parameters[\"radius\"]", "q and k at radius √D_h instead of √d_h"),
        ("qk = torch.cat([on_sphere(part, radius)[1] for part in parts], dim=-1)", "_, qk = on_sphere(qk, radius)", "q and k are normalised jointly"),
    ),
    *mutants(
        f"{A}polar.py",
        f"{T}test_oracle.py {T}test_polar.py",
        ("v_bar = rotate(output.v_bar, *turns.queries, inverse=True) if", "v_bar = rotate(output.v_bar, *turns.queries) if", "values are rotated further instead of back"),
    ),
    *mutants(
        f"{A}polar_noise.py",
        f"{T}test_oracle.py {T}test_polar.py",
        ("eta_k2=parameters[\"eta_tk\"].square()", "eta_k2=parameters[\"eta_tk\"]", "η_k is not squared"),
        ("m_inf2=parameters[\"m_inf\"].square()", "m_inf2=parameters[\"m_inf\"]", "m∞ is not squared"),
        ("mu = parameters[\"mu_r\"] if \"mu_r\" in parameters else", "mu = torch.zeros_like(parameters[\"beta\"]) if True else", "magnitudes never decay in the radial channel"),
        ("(values[\"mu\"] > 0) & (values[\"m_inf\"] > 0)", "(values[\"mu\"] > 0)", "precision that cannot grow is called unbounded"),
    ),
    *mutants(
        f"{A}frequencies.py",
        f"{T}test_oracle.py {T}test_polar.py",
        (".flip(0).view(heads, -1)", ".view(heads, -1)", "fast heads come first"),
        ("cos.repeat_interleave(self.group, 1), sin.repeat_interleave(self.group, 1)", "cos.repeat(1, self.group, 1, 1), sin.repeat(1, self.group, 1, 1)", "queries turn with another head's frequencies"),
    ),
    *mutants(
        f"{A}initialisation.py",
        "tests/model/test_initialisation.py",
        ("return self.hidden(fan_in) / (2 * self.n_layer) ** 0.5", "return self.hidden(fan_in)", "residual maps are not scaled down with depth"),
        ("return fan_in**-0.5 if self.kind == \"width\" else GPT2_STD", "return GPT2_STD", "0.02 at every width"),
        ("return (layers * (attention**2 + FEED_FORWARD_RMS**2) / (2 * self.n_layer)) ** 0.5", "return 0.1", "a raw block expects a stream of another size"),
    ),
    *mutants(
        f"{A}polar.py",
        "tests/contract/test_ladder_tie.py",
        ("if not value_weight_decay:", "if True:", "W_v never decays"),
        ("q, k = q * self.q_gain.to(q.dtype), k * self.k_gain.to(k.dtype)", "q, k = q * self.q_gain.to(q.dtype), k * self.q_gain.to(k.dtype)", "keys have the queries' gain"),
    ),
    *mutants(
        f"{A}polar_step.py",
        f"{T}test_polar.py {T}test_oracle.py",
        ("return alpha * tangent if alpha_over_m else alpha * m[..., None, None] * tangent", "return alpha * tangent", "alpha_over_m=false is ignored"),
        ("turned = retract(point, angular * update)", "turned = point + angular * update", "retract=norm does not retract"),
    ),
    *mutants(
        f"{A}xsa.py",
        f"{T}test_limits.py",
        ("self.exclusive = layers is None or shape.layer in layers", "self.exclusive = layers is None", "block.layers is ignored"),
        ("mode=\"per_head\").flatten(1, 2)", "mode=\"global\").flatten(1, 2)", "XSA projects over a group instead of per head"),
    ),
    *mutants(
        f"{A}standard.py",
        f"tests/model/test_llama_parity.py {T}test_limits.py {DECODING} {RECORD}",
        ("mask = None if causal or queries == 1 else", "mask = None if causal or documents is None else", "several queries on a longer cache see the future"),
        ("scores = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * q.shape[-1] ** -0.5", "scores = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2)", "recorded weights without 1/√D_h"),
        ("q_turned, k_turned = rotate(q, *turns.queries), rotate(k, *turns.keys)", "q_turned, k_turned = rotate(q, *turns.queries), k", "keys are not rotated"),
    ),
    *mutants(
        f"{A}rfa.py",
        f"{T}test_limits.py",
        ("eta_q2=parameters[\"eta_q\"].square() if", "eta_q2=zero if", "RFA's query noise is dropped"),
        ("parameters[\"sigma_process\"].square()", "parameters[\"sigma_process\"]", "RFA's process deviation is not squared"),
        ("mu.clamp_min(SLOWEST_DECAY), mu)", "mu, mu)", "RFA loses its process noise in heads without decay"),
    ),
    *mutants(
        f"{A}mixer.py",
        f"tests/model/test_gpt.py {DECODING}",
        ("self.length = stop\n", "self.length = stop - 1\n", "the cache overwrites its last token"),
    ),
    *mutants(
        f"{A}lean.py",
        f"{T}test_lean.py",
        ("return _Rotation.apply(gradients[0], cos, -sin), None, None", "return _Rotation.apply(gradients[0], cos, sin), None, None", "the gradient of a rotation is rotated the wrong way"),
        ("/ (x.shape[-1] * rms))", "/ rms)", "the gradient of the magnitude is D times too large"),
    ),
]
