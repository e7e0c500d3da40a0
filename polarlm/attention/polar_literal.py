"""Algorithm 1 exactly as printed: one head, d -> 2d, with all errata of the text, to show their effect.

Kept on purpose (numbers of docs/theory.md): the magnitude is an L2 norm (E4); C is used as if it were a cosine
although |q| = |k| = r (E2); the radial logit lacks its exponent nu_r + 1 (E1); P_T(v) = I - v v^H is applied to |v| = r
without 1/r^2 (E6) and with the complex product (E7); no 1/r in the update (E5). `m` in the radial residual, whose
broadcast the text does not define (E3), is the query's. Use `polar` to train a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from polarlm.attention.estimator import Estimator, refuse_noiseless, scalar
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import KeyValueCache, Mixer, MixerShape, TokenContext, mean_visible
from polarlm.attention.parts.influence import LOGIT_FLOPS
from polarlm.geometry import rotate
from polarlm.geometry.precision import log_kappa, log_kappa_tilde, log_rho, log_rho_tilde
from polarlm.geometry.robust import causal_mask
from polarlm.geometry.transport import to_complex, to_real


class PolarLiteralAttention(Mixer):
    """The printed algorithm; `n_head` has no effect, since it is stated for a single head."""

    pre_norm = False
    rotate_values = True
    calibrated = False  # its scales are part of what is printed

    def __init__(
        self,
        shape: MixerShape,
        nu_t: float = 4.0,
        nu_r: float = 4.0,
        eta_tq: float = 1.0,
        eta_tk: float = 1.0,
        eta_rq: float = 1.0,
        eta_rk: float = 1.0,
        sigma_t0: float = 1.0,
        sigma_r0: float = 1.0,
        m_inf: float = 1.0,
        mu: float = 0.01,
        alpha: float = 1.0,
        beta: float = 0.1,
        radius: float = 1.0,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(shape)
        d = shape.d_model
        self.qkv = linear(d, 3 * self.rotary_dim, shape.initial.hidden(d))
        self.out = linear(self.rotary_dim, d, shape.initial.residual(self.rotary_dim))
        given = dict(nu_t=nu_t, nu_r=nu_r, eta_tq=eta_tq, eta_tk=eta_tk, eta_rq=eta_rq, eta_rk=eta_rk)
        given |= dict(sigma_t0=sigma_t0, sigma_r0=sigma_r0, m_inf=m_inf, mu=mu, alpha=alpha, beta=beta, radius=radius)
        values = {name: scalar(name, value) for name, value in given.items()}
        refuse_noiseless(values, "eta_tk", "sigma_t0")
        refuse_noiseless(values, "eta_rk", "sigma_r0")
        self.estimator = Estimator(values, frozen, given)

    @property
    def rotary_dim(self) -> int:
        """2d real channels: d complex modes in the single head."""
        return 2 * self.shape.d_model

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Steps 1 to 8 of the printed algorithm."""
        p, rotary, record = self.estimator.read(), context.rotary, context.record
        with torch.autocast(x.device.type, enabled=False):  # scores and norms in fp32 or better
            wide = torch.promote_types(x.dtype, torch.float32)
            q, k, v = functional.linear(x.to(wide), self.qkv.weight.to(wide)).chunk(3, dim=-1)  # (B, T, 2d)
            m = torch.linalg.vector_norm(v, dim=-1)  # (B, T): L2, as printed
            q, k, v = (self._on_radius(part, p["radius"]) for part in (q, k, v))
            q_turned, k_turned, v_turned = (rotate(part, *rotary) for part in (q, k, v))
            m_seen = m
            if context.cache is not None:
                keys, values, stored = context.cache.append(k_turned.unsqueeze(1), v_turned.unsqueeze(1), m)
                k_turned, v_turned, m_seen = keys.squeeze(1), values.squeeze(1), m if stored is None else stored

            logits = self._logits(p, q_turned, k_turned, m, m_seen, context.documents)
            directional, radial = logits["directional"].softmax(-1), logits["radial"].softmax(-1)
            v_bar = rotate(directional @ v_turned, *rotary, inverse=True)
            m_bar = (logits["predicted"] * radial).sum(-1)
            along = (to_complex(v).conj() * to_complex(v_bar)).sum(-1, keepdim=True)
            tangent = p["alpha"] * (v_bar - to_real(to_complex(v) * along))
            delta_m = m_bar - m
            step = tangent + (p["beta"] * delta_m).unsqueeze(-1) * v
        if record is not None:
            heads = dict(q=q, k=k, v=v, v_bar=v_bar, update=tangent, weights=directional)
            record.update({name: value.unsqueeze(1) for name, value in heads.items()})
            record.update(rotary_cos=rotary[0], rotary_sin=rotary[1])
            record.update(magnitude=m, delta_m=delta_m, radial_weights=radial, params=p)
            log_evidence = logits["directional"].logsumexp(-1)
            record.update(log_kappa=logits["kappa"].unsqueeze(1), log_kappa_tilde=logits["kappa_tilde"].unsqueeze(1))
            record["log_evidence"] = log_evidence.unsqueeze(1)
            robust = directional * (log_evidence.unsqueeze(-1) - logits["kappa"]).exp()
            record["robust_weight"] = robust.unsqueeze(1)
        return self.out(step.to(x.dtype))

    def _on_radius(self, x: Tensor, scale: Tensor) -> Tensor:
        """RMSNorm over complex modes: |x| = s sqrt(d)."""
        modes = self.shape.d_model
        return x * (scale * modes**0.5) * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)

    def _logits(
        self, p: dict[str, Tensor], q: Tensor, k: Tensor, m: Tensor, m_seen: Tensor, documents: Tensor | None
    ) -> dict[str, Tensor]:
        """Steps 3 to 5: both channels' masked logits (B, T, S), and what they are made of."""
        queries, keys = q.shape[1], k.shape[1]
        time = torch.arange(keys, device=q.device, dtype=q.dtype)
        lag = (time[keys - queries :, None] - time).clamp_min(0)
        allowed = causal_mask(queries, keys, documents, q.device)
        tangential = dict(mu=p["mu"], eta_k2=p["eta_tk"].square(), sigma02=p["sigma_t0"].square())
        tangential["m_inf2"] = p["m_inf"].square()
        radial = dict(mu=p["mu"], eta_k2=p["eta_rk"].square(), sigma02=p["sigma_r0"].square())
        kappa = log_kappa(m_seen.unsqueeze(1), lag, **tangential)
        kappa_tilde = log_kappa_tilde(m_seen.unsqueeze(1), lag, eta_q2=p["eta_tq"].square(), **tangential)

        correlation = q @ k.transpose(1, 2)  # C, between -r^2 and r^2
        squared = q.square().sum(-1)[:, :, None] + k.square().sum(-1)[:, None, :] - 2 * correlation
        distance = kappa_tilde.exp() * squared.clamp_min(0) / self.shape.d_model
        directional = kappa - (p["nu_t"] + 1) * torch.log1p(distance / p["nu_t"])

        predicted = correlation * m_seen.unsqueeze(1) * torch.exp(-p["mu"] * lag)
        rho_tilde = log_rho_tilde(lag, eta_q2=p["eta_rq"].square(), **radial).exp()
        surprise = rho_tilde * (predicted - m.unsqueeze(-1)).square()
        radial_logits = log_rho(lag, **radial) - torch.log1p(surprise / p["nu_r"])
        return {
            "directional": directional.masked_fill(~allowed, float("-inf")),
            "radial": radial_logits.masked_fill(~allowed, float("-inf")),
            "predicted": predicted,
            "kappa": kappa,
            "kappa_tilde": kappa_tilde,
        }

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """An empty cache for the rotated keys, values and magnitudes of the single head."""
        return KeyValueCache(batch, 1, length, self.rotary_dim, device, dtype, magnitude=True)

    def flops_per_token(self, context: int) -> int:
        """Projections, scores, aggregation, and the element-wise work of two channels."""
        projections = 2 * (self.qkv.weight.numel() + self.out.weight.numel())
        return projections + int(mean_visible(context) * (4 * self.rotary_dim + 2 * LOGIT_FLOPS))
