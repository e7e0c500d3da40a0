"""RFA as its language models were trained (Racioppo 2025, Appendix E), where `rfa` shares polarlm's conventions.

Queries and keys are not normalised, an inverse temperature is learned per head, query noise enters prior and distance
alike, decay rates are fixed multiples of rotation frequencies, and a token's own value may be subtracted. Left out of
the author's code are its numerical limits (exponents of at least -10, variances of at least 0.01) and biases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polarlm.attention.estimator import ZERO_SHARE, Positive, Value, per_head
from polarlm.attention.mixer import MixerShape
from polarlm.attention.rfa import RobustFilterAttention
from polarlm.attention.robust import AttentionOutput, RobustCall
from polarlm.attention.robust.call import Weights
from polarlm.geometry.precision import log_variance
from polarlm.geometry.robust import causal_mask
from polarlm.geometry.transport import rotary_frequencies


class PublishedFilterAttention(RobustFilterAttention):
    """A = softmax(beta L), L = log P - (nu + 1) log(1 + P |q - E k|^2 / (nu d)), delta = sum_j A_ij E_ij v_j - v_i.

    The rate of head h is mu_h = damping * omega_h, omega_h its fastest frequency where one bank is cut into heads from
    slow to fast; with `undamped` the slowest quarter of the heads does not decay.
    """

    def __init__(
        self,
        shape: MixerShape,
        *,
        damping: float = 4.89e-4,
        undamped: bool = True,
        inverse_temperature: Value = 1.313,
        subtract_value: bool = True,
        nu: Value = 4.08,
        eta_k: Value = 1.0,
        sigma_0: Value = 1.0,
        process_floor: float = 0.1,
        frequencies: str = "shared",
        frozen: Sequence[str] = ("mu",),
    ) -> None:
        rates = coupled_rates(shape, per_head("damping", damping, 1).item(), undamped)
        floor = per_head("process_floor", process_floor, 1)
        super().__init__(
            shape,
            qk_norm=False,
            nu=nu,
            eta_q=0.0,  # gamma^2 stands in prior and distance: it is the floor
            eta_k=eta_k,
            sigma_0=sigma_0,
            sigma_process=(2 * rates * floor).sqrt().tolist(),
            mu=rates.tolist(),
            frequencies=frequencies,
            frozen=frozen,
        )
        self.inverse_temperature = Positive(per_head("inverse_temperature", inverse_temperature, shape.n_head))
        self.subtract_value = subtract_value

    def attend(self, call: RobustCall) -> AttentionOutput:
        """Robust attention with tempered logits; no fast kernel raises the precision itself to a power."""
        dtype, noise = call.score_dtype, call.noise
        group = call.q.shape[1] // call.k.shape[1]
        with torch.autocast(call.q.device.type, enabled=False):
            q = call.q.to(dtype)
            k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (call.k, call.v))
            queries, keys = q.shape[2], k.shape[2]
            times = torch.arange(keys, device=q.device)
            lag = (times[keys - queries :, None] - times).clamp_min(0).to(dtype)

            def heads(x: Tensor) -> Tensor:
                return x.to(dtype)[:, None, None]

            age = heads(noise.mu) * lag
            process = None if noise.process2 is None else heads(noise.process2)
            log_precision = -log_variance(age, 1.0, heads(noise.eta_k2), heads(noise.sigma02), process)
            decay = torch.exp(-age)
            squares = q.square().sum(-1)[..., :, None] + decay**2 * k.square().sum(-1)[..., None, :]
            distance = (squares - 2 * decay * (q @ k.mT)).clamp_min(0) * log_precision.exp() / call.half
            nu = heads(noise.shape(call.kernel))
            log_robust = -(nu + 1) * torch.log1p(distance / nu)
            logits = heads(self.inverse_temperature()) * (log_precision + log_robust)
            allowed = causal_mask(queries, keys, call.documents, q.device).unsqueeze(-3)
            logits = logits.masked_fill(~allowed, float("-inf"))
            shares = decay * logits.softmax(-1)
            dropped = torch.nn.functional.dropout(shares, call.dropout)
            weights = None
            if call.return_weights:
                precision = log_precision.unsqueeze(0)
                weights = Weights(shares, precision, precision, log_robust.exp() * allowed)
            return AttentionOutput((dropped @ v).to(call.v.dtype), logits.logsumexp(-1), weights=weights)

    def update(self, v_bar: Tensor, own: Tensor) -> Tensor:
        """The estimate, minus the token's own value if `subtract_value` is on."""
        if not self.subtract_value:
            return v_bar
        return v_bar - own.repeat_interleave(v_bar.shape[1] // own.shape[1], dim=1)


def coupled_rates(shape: MixerShape, damping: float, undamped: bool) -> Tensor:
    """damping * the fastest frequency of every head's part of the spectrum, slow heads first."""
    groups = shape.n_kv_head
    bank = rotary_frequencies(groups * shape.head_dim, shape.rope_base, dtype=torch.float64).flip(0).view(groups, -1)
    rates = damping * bank.amax(-1).repeat_interleave(shape.n_head // groups)
    if undamped:
        rates[: int(ZERO_SHARE * shape.n_head)] = 0
    return rates
