"""Robust Filter Attention (Racioppo 2025; Appendix A): attention as a robust filter of an isotropic linear SDE.

Keys and values decay as they are carried forward, precision is the inverse of the propagated covariance, and the
influence of a key falls with its Mahalanobis distance from the query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polarlm.attention.additions import HeadGate, ValueResidual
from polarlm.attention.estimator import (
    Estimator,
    Value,
    choice,
    decay_rates,
    matched_variance,
    per_head,
    refuse_noiseless,
    slowest_instead_of_none,
)
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import Mixer, MixerShape, TokenContext, merge_heads, split_heads
from polarlm.attention.parts.influence import record_estimate, robust_flops
from polarlm.attention.parts.transport import Frequencies, Turns
from polarlm.attention.robust import PLAIN_KERNELS, AttentionOutput, DirectionalNoise, RobustCall, robust_attention
from polarlm.geometry.sphere import on_sphere
from polarlm.geometry.transport import rotate

PARAMETERS = ("nu", "eta_q", "eta_k", "sigma_0", "sigma_process", "mu", "tau")
# Shares of a matched total variance: RFA starts "integrative", with measurement noise above process and floor.
SHARES = {"eta_k": 0.45, "eta_q": 0.45, "sigma_0": 0.1, "sigma_process": 0.045}
SLOWEST_DECAY = 1e-6  # per token: E differs from 1 by less than 1e-3 over a thousand tokens


class RobustFilterAttention(Mixer):
    """RFA: L = log P - (nu+1) log(1 + P~ |q - E k|^2 / (nu d)), A = softmax L, v_bar = sum_j A_ij E_ij v_j.

    Noises left as None share the total variance that matches the logit range of QK-normed attention.
    `sigma_process` is the deviation sigma that the process gathers per square root of a token: it adds the variance
    sigma^2 (1 - E^2)/2mu, which tends to sigma^2/2mu at long lags and is sigma^2 lag in a head without decay.
    """

    def __init__(
        self,
        shape: MixerShape,
        kernel: str = "student",
        qk_norm: bool = True,
        rotate_values: bool = True,
        decay_keys: bool = True,
        decay_values: bool = True,
        nu: Value = 4.0,
        tau: Value = 1.0,
        eta_q: Value | None = None,
        eta_k: Value | None = None,
        sigma_0: Value | None = None,
        sigma_process: Value | None = None,
        mu: Value = 0.01,
        mu_spread: bool = True,
        frequencies: str = "shared",
        head_gate: bool = False,
        value_residual: bool = False,
        frozen: Sequence[str] = (),
        backend: str = "auto",
    ) -> None:
        super().__init__(shape)
        self.kernel = choice("kernel", kernel, PLAIN_KERNELS)
        self.qk_norm, self.rotate_values = qk_norm, rotate_values
        self.decay_keys, self.decay_values, self.backend = decay_keys, decay_values, backend
        self.normalised_weights = not decay_values
        self.frequencies = Frequencies(frequencies, shape, shape.head_dim)
        self.heads = (shape.n_head, shape.n_kv_head, shape.n_kv_head)  # of q, k, v
        self.qkv = linear(shape.d_model, sum(self.heads) * shape.head_dim, shape.initial.hidden(shape.d_model))
        inner = shape.n_head * shape.head_dim
        self.out = linear(inner, shape.d_model, shape.initial.residual(inner))
        self.head_gate = HeadGate(shape) if head_gate else None
        self.value_residual = ValueResidual(shape) if value_residual else None
        if not qk_norm:  # then the weights themselves must give |q|^2 = d_h on a unit-RMS input
            with torch.no_grad():
                queries_and_keys = self.qkv.weight[: (shape.n_head + shape.n_kv_head) * shape.head_dim]
                queries_and_keys *= (2 * shape.d_model) ** -0.5 / shape.initial.hidden(shape.d_model)

        heads = shape.n_head
        values = {"nu": per_head("nu", nu, heads), "tau": per_head("tau", tau, heads)}
        total = matched_variance(kernel, shape.head_dim, values["nu"], values["tau"])
        given = {"eta_k": eta_k, "eta_q": eta_q, "sigma_0": sigma_0, "sigma_process": sigma_process}
        values["mu"] = decay_rates("mu", mu, mu_spread, heads)
        shares = {name: share * total for name, share in SHARES.items()}
        shares["sigma_process"] *= 2 * slowest_instead_of_none(values["mu"])  # given as what it comes to at long lags
        for name, value in given.items():
            values[name] = shares[name].sqrt() if value is None else per_head(name, value, heads)
        refuse_noiseless(values, "eta_k", "sigma_0")
        floor = values["sigma_0"].square() + values["sigma_process"].square()
        self.bounded = not bool(((floor == 0) & (values["mu"] > 0)).any())
        unused = {"exponential": ["nu"], "gaussian": ["nu", "tau", "eta_q"]}.get(kernel, ["tau"])
        self.estimator = Estimator({n: v for n, v in values.items() if n not in unused}, frozen, PARAMETERS)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Rotate, estimate, aggregate, counter-rotate, W_o."""
        q, k, v = split_heads(self.qkv(x), sum(self.heads)).split(self.heads, dim=1)
        if self.qk_norm:  # |q|^2 = |k|^2 = d_h complex modes: half a unit per real channel
            _, q = on_sphere(q, 0.5**0.5)
            _, k = on_sphere(k, 0.5**0.5)
        if self.value_residual is not None:
            v = self.value_residual(v, context)
        turns: Turns = self.frequencies(context)
        q_turned, k_turned = rotate(q, *turns.queries), rotate(k, *turns.keys)
        v_turned = rotate(v, *turns.keys) if self.rotate_values else v
        if context.cache is not None:
            k_turned, v_turned, _ = context.cache.append(k_turned, v_turned)

        parameters, record = self.estimator.read(), context.record
        call = RobustCall(
            q_turned,
            k_turned,
            v_turned,
            noise=self.noise(parameters),
            kernel=self.kernel,
            decay_keys=self.decay_keys,
            decay_values=self.decay_values,
            bounded=self.bounded,
            documents=context.documents,
            dropout=self.shape.dropout if self.training else 0.0,
            return_weights=record is not None,
        )
        output = self.attend(call)
        v_bar = rotate(output.v_bar, *turns.queries, inverse=True) if self.rotate_values else output.v_bar
        update = self.update(v_bar, v)
        if record is not None:
            record.update(q=q, k=k, v=v, v_bar=v_bar, update=update, params=parameters, **turns.recorded())
            record_estimate(record, output)
        if self.head_gate is not None:
            update = update * self.head_gate(x).transpose(1, 2).unsqueeze(-1)
        return self.out(merge_heads(update))

    def attend(self, call: RobustCall) -> AttentionOutput:
        """Robust attention, on the fastest backend that supports this call."""
        return robust_attention(call, "reference" if call.return_weights else self.backend)

    def update(self, v_bar: Tensor, own: Tensor) -> Tensor:
        """The output of the heads, from the estimates (B, H, T, Dh) and the tokens' own values (B, G, T, Dh)."""
        return v_bar

    def noise(self, parameters: dict[str, Tensor]) -> DirectionalNoise:
        """Variances from the scalars."""
        mu = parameters["mu"]
        zero, process2 = torch.zeros_like(mu), parameters["sigma_process"].square()
        # sigma^2 (1 - E^2)/2mu -> sigma^2 lag: a head without decay, but with a process, decays this little instead.
        mu = torch.where(process2 > 0, mu.clamp_min(SLOWEST_DECAY), mu)
        return DirectionalNoise(
            mu=mu,
            eta_k2=parameters["eta_k"].square(),
            eta_q2=parameters["eta_q"].square() if "eta_q" in parameters else zero,
            sigma02=parameters["sigma_0"].square(),
            m_inf2=zero,
            nu=parameters.get("nu"),
            tau=parameters.get("tau"),
            process2=process2 / (2 * mu.clamp_min(SLOWEST_DECAY)),
        )

    def flops_per_token(self, context: int) -> int:
        """Projections and robust attention."""
        projections = 2 * (self.qkv.weight.numel() + self.out.weight.numel())
        projections += self.head_gate.flops_per_token() if self.head_gate is not None else 0
        return projections + robust_flops(context, self.shape.n_head, self.shape.head_dim)
