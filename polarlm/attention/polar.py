"""The Polar Transformer's attention: Algorithm 1, with several heads as in Appendix D.

Conventions (one choice makes every factor of the printed algorithm consistent):
the value direction v sits at radius sqrt(D), so its channels have RMS 1, and the magnitude m is the RMS of W_v z; hence
m*v = W_v z, and alpha*Delta + beta*dm*v is the differential of m*v. q and k sit at radius s*sqrt(d_h), d_h = Dh/2
complex modes. Products are real: <a, b> = Re a^H b.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention.additions import HeadGate, ValueResidual
from polarlm.attention.estimator import FRACTIONS, Estimator, Positive
from polarlm.attention.mixer import KeyValueCache, Mixer, MixerShape, TokenContext
from polarlm.attention.parts import SCALARS, Parts, flat_settings
from polarlm.attention.parts.precision import remembered
from polarlm.attention.parts.transport import ContentTransport, Frequencies
from polarlm.attention.robust import DirectionalNoise, RobustCall
from polarlm.block_keys import PARTS

Part = str | Mapping[str, Any]


class PolarAttention(Mixer):
    """Robust directional estimate per head, tangent projection over heads, radial estimate of the magnitude.

    Every part is the name of a choice or {kind: its name, setting: value, …} (polarlm/attention/parts/). `symbols` are
    the paper's (nu, eta, mu, alpha, beta, m_inf) and the finer settings of the chosen parts. Noises left as None share
    the total variance that matches the logit range of QK-normed attention.
    """

    # What the parts have registered here; listed in this order, by which optimisers in checkpoints number parameters.
    frequencies: Frequencies
    qk: nn.Linear | None  # W_q and W_k
    v: nn.Linear
    value_residual: ValueResidual | None
    head_gate: HeadGate | None
    transport: ContentTransport | None
    q_gain: nn.Parameter | None
    k_gain: nn.Parameter | None
    estimator: Estimator
    parts: Parts
    lift: int

    def __init__(
        self,
        shape: MixerShape,
        inputs: Part = "sphere",
        transport: Part = "rotary",
        precision: Part = "magnitude",
        influence: Part = "student",
        forgetting: Part = "content",
        aggregate: Part = "mean",
        radial: Part = "none",
        step: Part = "tangent",
        output: Part = "free",
        frozen: Sequence[str] = ("alpha", "nu_t"),
        backend: str = "auto",
        **symbols: Any,
    ) -> None:
        super().__init__(shape)
        self.backend = backend
        for name in ("frequencies", "qk", "v", "out", "forget", "head_gate", "value_residual", "transport"):
            self.__dict__.pop(name, None)
            self.register_module(name, None)
        chosen = (inputs, transport, precision, influence, forgetting, aggregate, radial, step, output)
        parts = Parts(self, flat_settings(dict(zip(PARTS, chosen)), symbols))
        scalars = {name: value for part in parts for name, value in part.scalars.items()}
        known = [*SCALARS, *(name for name in scalars if name not in SCALARS)]
        used = {name: scalars[name] for name in known if name in scalars.keys() - parts.unused()}
        self.estimator = Estimator(used, frozen, known, FRACTIONS)

    @property
    def rotary_dim(self) -> int:
        """Real channels per head: Dh, doubled by the paper's lift to complex numbers."""
        return self.lift * self.shape.head_dim

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Algorithm 1, steps 1 to 8; steps 9 and 10 (residual, feed-forward) are the block's."""
        parts, p, cache, record = self.parts, self.estimator.read(), context.cache, context.record
        latent = parts.inputs(x, p, context)  # 1 and 2: directions in a common frame, and one magnitude
        k, v, m = latent.k, latent.v, latent.m
        if cache is not None:
            k, v, stored = cache.append(k, v, m)
            m = m if stored is None else stored
        prior = parts.precision.prior(x, context, p) if parts.precision.carried else None
        call = RobustCall(
            latent.q,
            k,
            v,
            noise=DirectionalNoise.of(p),  # 3: precision of every pair
            # Unit magnitudes are carried forward like any other, so the prior over lags stays what it is.
            magnitude=m if parts.precision.magnitude == "own" else torch.ones_like(m),
            equilibrium=p.get("m_eq"),
            bounded=parts.precision.bounded,
            log_query_variance=None if prior is None else prior.log_variance("q"),
            log_key_variance=None if prior is None else remembered(context, prior.log_variance("k")),
            kernel=parts.influence.kernel,  # 4: robust weights
            residual_form=parts.influence.residual_form,
            forgotten=parts.forgetting(x, context),
            consensus=parts.aggregate.consensus,  # 5: the mean
            radial_mode=parts.radial.mode,  # 6: the radial estimate
            radial=parts.radial.noise(p) if parts.radial.noisy else None,
            radial_correlation=parts.radial.radial_correlation,
            documents=context.documents,
            dropout=self.shape.dropout if self.training else 0.0,
            return_weights=record is not None,
        )
        output = parts.influence.estimate(call, p, record)  # 3 to 6
        step = parts.step(latent, output, p, prior, record)  # 7: along the sphere, and out of the frame
        if record is not None:
            record.update(params=p, **latent.frame.recorded(v))
        if self.head_gate is not None:
            step = step * self.head_gate(x).unsqueeze(-1)
        step = step.to(latent.v.dtype)
        return parts.output.tied(step) if self.tie_output else self.out(step.flatten(-2))  # 8: back to the stream

    @contextlib.contextmanager
    def unit_step(self) -> Iterator[None]:
        """Set alpha to 1 while W_o is scaled, so that the scale of W_o does not cancel alpha."""
        own: Any = self.estimator["alpha"]
        self.estimator["alpha"] = Positive(torch.ones_like(own().detach()), learn=own.raw.requires_grad)
        try:
            yield
        finally:
            self.estimator["alpha"] = own

    def without_effect(self) -> set[str]:
        """Settings that have no effect together with the others."""
        return self.parts.without_effect()

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """An empty cache for rotated keys, values and their magnitudes."""
        return KeyValueCache(batch, self.shape.n_kv_head, length, self.rotary_dim, device, dtype, magnitude=True)

    def flops_per_token(self, context: int) -> int:
        """The sum of the parts' FLOPs."""
        return sum(part.flops_per_token(context) for part in self.parts)
