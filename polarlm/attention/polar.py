"""The Polar Transformer's attention: Algorithm 1, with several heads as in Appendix D.

Conventions (one choice makes every factor of the printed algorithm consistent):
the value direction v sits at radius sqrt(D), so its channels have RMS 1, and the magnitude m is the RMS of W_v z; hence
m*v = W_v z, and alpha*Delta + beta*dm*v is the differential of m*v. q and k sit at radius s*sqrt(d_h), d_h = Dh/2
complex modes. Products are real: <a, b> = Re a^H b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from polarlm.attention.additions import HeadGate, ValueResidual
from polarlm.attention.decoding import decode, decoder_for
from polarlm.attention.estimator import Estimator, Value, choice
from polarlm.attention.filter import record_estimate, robust_flops
from polarlm.attention.frequencies import Frequencies, Turns
from polarlm.attention.initialisation import linear
from polarlm.attention.kernels import (
    KERNELS,
    RADIAL_CORRELATIONS,
    RobustCall,
    check_residual_form,
    robust_attention,
)
from polarlm.attention.lean import on_sphere, rotate
from polarlm.attention.mixer import (
    KeyValueCache,
    Mixer,
    MixerShape,
    TokenContext,
    split_heads,
)
from polarlm.attention.polar_decoding import polar_recipe
from polarlm.attention.polar_noise import (
    PARAMETERS,
    RADIAL,
    directional_noise,
    initial_values,
    is_bounded,
    radial_noise,
)
from polarlm.attention.polar_step import check_retraction, directional_step, radial_step
from polarlm.errors import UserError
from polarlm.geometry import project
from polarlm.geometry.multihead import PROJECTIONS, Projection


class PolarAttention(Mixer):
    """Robust directional estimate per head, tangent projection over heads, radial estimate of the magnitude.

    Noises left as None share the total variance that matches the logit range of QK-normed attention.
    """

    def __init__(
        self,
        shape: MixerShape,
        kernel: str = "student",
        projection: str = "per_head",
        radial: str | bool = "none",
        radial_correlation: str = "vv",
        rotate_values: bool = True,
        frequencies: str = "shared",
        head_gate: bool = False,
        value_residual: bool = False,
        norm_position: str = "both",
        norm_scope: str = "per_head",
        norm_gain: str = "none",
        lift: int = 1,
        magnitude: str | bool = "own",
        norm_values: bool = True,
        value_weight_decay: bool = False,
        residual_form: str = "full",
        evidence_clamp: float | None = 8.0,
        alpha_over_m: bool = True,
        retract: str = "none",
        irls_steps: int = 1,
        nu_t: Value = 4.0,
        tau: Value = 1.0,
        eta_tq: Value | None = None,
        eta_tk: Value | None = None,
        sigma_t0: Value | None = None,
        m_inf: float = 0.1,
        mu: Value = 0.01,
        mu_spread: bool = True,
        radius: float = 1.0,
        alpha: float = 1.0,
        beta: float = 0.1,
        mu_r: float = 0.0,
        nu_r: float = 4.0,
        eta_rq: float = 0.316,
        eta_rk: float = 0.316,
        sigma_r0: float = 0.316,
        frozen: Sequence[str] = ("alpha",),
        backend: str = "auto",
    ) -> None:
        super().__init__(shape)
        self.kernel = choice("kernel", kernel, KERNELS)
        self.projection = cast(Projection, choice("projection", projection, PROJECTIONS))
        # Words that YAML leaves alone; `off` and `on`, which it reads as booleans, are still understood.
        self.radial = choice("radial", radial, ("none", "own", "shared"), {"off": "none", "false": "none"})
        also = {"on": "own", "true": "own", "off": "unit", "false": "unit"}
        self.magnitude = choice("magnitude", magnitude, ("own", "unit"), also) == "own"
        self.norm_position = choice("norm_position", norm_position, ("post", "pre", "both"))
        self.norm_scope = choice("norm_scope", norm_scope, ("global", "per_head"))
        if lift not in (1, 2):
            raise UserError(
                f"block.lift is {lift}; allowed: 1 (parameter parity with standard), 2 (the paper's d -> 2d)."
            )
        self.residual_form = check_residual_form(residual_form, kernel)
        self.radial_correlation = choice("radial_correlation", radial_correlation, RADIAL_CORRELATIONS)
        self.retract = check_retraction(retract, projection, norm_values)
        self.alpha_over_m, self.irls_steps = alpha_over_m, _at_least("irls_steps", irls_steps, 1)
        if kernel == "gaussian" and irls_steps > 1:
            raise UserError(f"block.irls_steps={irls_steps} needs residuals, and block.kernel=gaussian ignores them.")
        self.evidence_clamp = None if evidence_clamp is None else _at_least("evidence_clamp", evidence_clamp, 0)
        self.lift, self.rotate_values, self.norm_values, self.backend = lift, rotate_values, norm_values, backend
        if self.radial != "none" and not (self.magnitude and norm_values):
            raise UserError(
                f"block.radial={radial} estimates the magnitude of normalised values; it needs block.magnitude=own and "
                "block.norm_values=true. Set those, or block.radial=none."
            )
        # Only `both` gets a normalised stream; `post` needs it raw, `pre` splits off its magnitude itself.
        self.pre_norm = norm_position == "both"
        self.frequencies = Frequencies(frequencies, shape, self.rotary_dim)

        d, heads, groups, size = shape.d_model, shape.n_head, shape.n_kv_head, self.rotary_dim
        # Un-normalised q and k must come out at radius sqrt(d_h) by themselves.
        qk_std = (2 * d) ** -0.5 if norm_position == "pre" else shape.initial.hidden(d)
        self.qk = linear(d, (heads + groups) * size, qk_std) if kernel != "gaussian" else None
        # Normalised values leave their scale to m, which starts at 1 on a unit-RMS input under any convention.
        self.v = linear(d, groups * size, d**-0.5 if norm_values else shape.initial.hidden(d))
        if not value_weight_decay:  # nothing but m would drift
            self.v.optim_group = "no_decay"  # type: ignore[assignment]
        self.out = linear(heads * size, d, shape.initial.residual(heads * size))
        self.head_gate = HeadGate(shape, raw_stream=not self.pre_norm) if head_gate else None
        self.value_residual = ValueResidual(shape) if value_residual else None
        # One gain per channel, shared by the heads, as in QK-norm; the paper has none (|q| = |k| = r).
        learned_gain = choice("norm_gain", norm_gain, ("none", "channel")) == "channel" and self.qk is not None
        self.q_gain = nn.Parameter(torch.ones(size)) if learned_gain else None
        self.k_gain = nn.Parameter(torch.ones(size)) if learned_gain else None

        given = dict(nu_t=nu_t, tau=tau, eta_tq=eta_tq, eta_tk=eta_tk, sigma_t0=sigma_t0, m_inf=m_inf, mu=mu)
        given |= dict(radius=radius, alpha=alpha, beta=beta)
        given |= dict(mu_r=mu_r, nu_r=nu_r, eta_rq=eta_rq, eta_rk=eta_rk, sigma_r0=sigma_r0)
        values = initial_values(kernel, heads, size, mu_spread, given)
        self.bounded = is_bounded(values)
        if not self.pre_norm:
            self.input_rms = self._stream_rms()
        values["gain"] = torch.tensor(1 / self.input_rms)
        idle = self.without_effect() | ({"mu_r"} if mu_r == 0 else set())  # magnitudes that do not decay have no rate
        used = {name: value for name, value in values.items() if name not in idle}
        self.estimator = Estimator(used, frozen, PARAMETERS)

    @property
    def rotary_dim(self) -> int:
        """Real channels per head: Dh, doubled by the paper's lift to complex numbers."""
        return self.lift * self.shape.head_dim

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Algorithm 1, steps 1 to 8; steps 9 and 10 (residual, feed-forward) are the block's."""
        decoder = decoder_for(x, context, self.backend, lambda: polar_recipe(self))
        if decoder is not None and self.qk is not None:
            q, k = self.qk(x).split([self.rotary_dim * n for n in (self.shape.n_head, self.shape.n_kv_head)], dim=-1)
            return self.out(decode(decoder, context, q, k, self.v(x)))
        parameters = self.estimator.read()
        q, k, v, m = self._project(x, parameters, context)  # step 1

        turns: Turns = self.frequencies(context)  # step 2
        q_turned, k_turned = rotate(q, *turns.queries), rotate(k, *turns.keys)
        v_turned = rotate(v, *turns.keys) if self.rotate_values else v
        m_seen = m
        if context.cache is not None:
            k_turned, v_turned, stored = context.cache.append(k_turned, v_turned, m)
            m_seen = m if stored is None else stored

        record = context.record
        call = RobustCall(
            q_turned,
            k_turned,
            v_turned,
            noise=directional_noise(parameters),
            kernel=self.kernel,
            # Unit magnitudes are carried forward like any other, so the prior over lags stays what it is.
            magnitude=m_seen if self.magnitude else torch.ones_like(m_seen),
            residual_form=self.residual_form,
            radial_mode="off" if self.radial == "none" else self.radial,
            radial=radial_noise(parameters, self.radial),
            radial_correlation=self.radial_correlation,
            bounded=self.bounded,
            documents=context.documents,
            dropout=self.shape.dropout if self.training else 0.0,
            return_weights=record is not None,
        )
        for _ in range(self.irls_steps - 1):
            call = self._refined(call, parameters)
        output = robust_attention(call, self.backend if record is None else "reference")  # steps 3 to 6
        v_bar = rotate(output.v_bar, *turns.queries, inverse=True) if self.rotate_values else output.v_bar

        # Step 7. Grouped value heads stand for each of their query heads (B, T, H, Dh).
        group, wide = v_bar.shape[1] // v.shape[1], torch.promote_types(v.dtype, torch.float32)
        own = (v if group == 1 else v.repeat_interleave(group, dim=1)).transpose(1, 2).to(wide)
        mean, log_evidence = v_bar.transpose(1, 2).to(wide), output.log_evidence.transpose(1, 2)
        tangent = project(own, mean, log_evidence, self.projection, self.evidence_clamp)
        step = directional = directional_step(
            own, mean, tangent, m, parameters["alpha"], alpha_over_m=self.alpha_over_m, retraction=self.retract
        )
        if output.m_bar is not None:
            delta_m = output.m_bar - m
            step = directional + radial_step(own, m, directional, parameters["beta"] * delta_m, retraction=self.retract)

        if record is not None:
            record.update(q=q, k=k, v=v, magnitude=m, v_bar=v_bar, update=directional.transpose(1, 2))
            record.update(params=parameters, **turns.recorded())
            record_estimate(record, output)
            if output.m_bar is not None:
                record["delta_m"] = delta_m
        if self.head_gate is not None:
            step = step * self.head_gate(x).unsqueeze(-1)
        return self.out(step.flatten(-2).to(v.dtype))  # step 8

    def _refined(self, call: RobustCall, parameters: dict[str, Tensor]) -> RobustCall:
        """One iteration of reweighting (Appendix E): what the keys agree on takes the query's place."""
        consensus = replace(call, v=call.k, radial_mode="off", dropout=0.0, return_weights=False)
        _, q = on_sphere(robust_attention(consensus, self.backend).v_bar, parameters["radius"] * 0.5**0.5)
        return replace(call, q=q)

    def _project(
        self, x: Tensor, parameters: dict[str, Tensor], context: TokenContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step 1: q, k, v (B, heads, T, Dh) on their spheres, magnitude m (B, T)."""
        heads, groups, size = self.shape.n_head, self.shape.n_kv_head, self.rotary_dim
        m = None
        if self.norm_position == "post":
            x = parameters["gain"] * x
        elif self.norm_position == "pre":  # the sphere is the stream's, and so is the magnitude: m = |z|
            m, x = on_sphere(x, 1.0)
            m = parameters["gain"] * m
        v = self.v(x) if self.value_residual is None else self.value_residual(self.v(x), context)
        length, direction = on_sphere(v, 1.0)
        m = length if m is None else m
        v = direction if self.norm_values else v
        v, m = split_heads(v, groups), m.squeeze(-1)
        if self.qk is None:  # the Gaussian kernel weighs by precision alone: q and k have no say
            return v.new_zeros(v.shape[0], heads, *v.shape[2:]), torch.zeros_like(v), v, m

        qk = self.qk(x)
        radius = parameters["radius"] * 0.5**0.5  # |q|^2 = s^2 d_h = s^2 Dh/2
        if self.norm_position == "pre":
            qk = qk * parameters["radius"].to(qk.dtype)
        elif self.norm_scope == "global":
            parts = qk.split([heads * size, groups * size], dim=-1)
            qk = torch.cat([on_sphere(part, radius)[1] for part in parts], dim=-1)
        qk = split_heads(qk, heads + groups)
        if self.norm_position != "pre" and self.norm_scope == "per_head":
            _, qk = on_sphere(qk, radius)
        q, k = qk.split([heads, groups], dim=1)
        if self.q_gain is not None and self.k_gain is not None:
            q, k = q * self.q_gain.to(q.dtype), k * self.k_gain.to(k.dtype)
        return q, k, v, m

    def without_effect(self) -> set[str]:
        """Parameters and switches that the other switches leave no use for; such parameters are not created."""
        idle = {"student": {"tau"}, "exponential": {"nu_t"}, "gaussian": {"nu_t", "tau", "eta_tq", "radius"}}[
            self.kernel
        ]
        idle |= {"none": set(RADIAL), "shared": set(RADIAL) - {"beta", "mu_r"}, "own": set()}[self.radial]
        idle |= {"gain"} if self.norm_position == "both" else set()
        idle |= {"radial_correlation"} if self.radial == "none" else set()
        idle |= {"evidence_clamp"} if self.projection != "evidence" else set()
        if self.kernel == "gaussian":
            idle |= {"norm_scope", "norm_gain", "residual_form"}
        return idle | ({"norm_scope"} if self.norm_position == "pre" else set())

    def _stream_rms(self) -> float:
        """RMS of a fresh model's residual stream where this layer reads it: embedding plus what came before."""
        return math.hypot(self.shape.stream_std, self.shape.initial.added_rms(self.shape.d_model, self.shape.layer))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """Rotated keys, values and their magnitudes."""
        return KeyValueCache(batch, self.shape.n_kv_head, length, self.rotary_dim, device, dtype, magnitude=True)

    def flops_per_token(self, context: int) -> int:
        """Projections, robust attention once per reweighting, and the correlation of the radial channel."""
        layers = [layer for layer in (self.qk, self.v, self.out) if layer is not None]
        correlation = self.radial_correlation if self.radial != "none" else None
        attention = robust_flops(context, self.shape.n_head, self.rotary_dim, correlation)
        attention += (self.irls_steps - 1) * robust_flops(context, self.shape.n_head, self.rotary_dim)
        attention += self.head_gate.flops_per_token() if self.head_gate is not None else 0
        return 2 * sum(layer.weight.numel() for layer in layers) + attention


def _at_least(name: str, value: Any, lowest: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= lowest:
        raise UserError(f"block.{name} is {value!r}; it must be a number of at least {lowest}.")
    return value
