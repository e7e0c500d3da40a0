"""The Polar Transformer's attention: Algorithm 1, with several heads as in Appendix D.

Conventions (one choice makes every factor of the printed algorithm consistent):
the value direction v sits at radius sqrt(D), so its channels have RMS 1, and the magnitude m is the RMS of W_v z; hence
m*v = W_v z, and alpha*Delta + beta*dm*v is the differential of m*v. q and k sit at radius s*sqrt(d_h), d_h = Dh/2
complex modes. Products are real: <a, b> = Re a^H b.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from polarlm.attention.additions import HeadGate, ValueResidual
from polarlm.attention.content_transport import TRANSPORTS, CommonFrame, ContentTransport
from polarlm.attention.estimator import FRACTIONS, Estimator, Positive, Value, choice
from polarlm.attention.filter import gate_flops, record_estimate, robust_flops, widening_flops
from polarlm.attention.forgetting import forget_gate
from polarlm.attention.frequencies import Frequencies
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import KeyValueCache, Mixer, MixerShape, TokenContext, mean_visible
from polarlm.attention.polar_inputs import project_inputs, turned_inputs
from polarlm.attention.polar_noise import (
    PARAMETERS,
    check_flow,
    directional_noise,
    initial_values,
    is_bounded,
    radial_noise,
)
from polarlm.attention.polar_step import check_retraction, directional_step, gated_mean, radial_step, takes_tangent_step
from polarlm.attention.polar_switches import (
    OFF,
    UNIT,
    at_least,
    check_carried,
    check_consensus,
    check_iterations,
    check_lift,
    check_radial,
    check_tie,
    check_transport,
    check_uncertainty,
    idle_settings,
    idle_switches,
)
from polarlm.attention.robust import (
    CONSENSUS,
    PLAIN_KERNELS,
    RADIAL_CORRELATIONS,
    AttentionOutput,
    RobustCall,
    check_residual_form,
    robust_attention,
)
from polarlm.attention.tied_output import make_orthonormal, tied_output
from polarlm.attention.uncertainty import prior_of, remembered, unused_here
from polarlm.block_keys import PARTS, flat_block
from polarlm.errors import UserError
from polarlm.geometry import project
from polarlm.geometry.multihead import PROJECTIONS, Projection, tangent_step
from polarlm.geometry.sphere import Field, on_sphere

Part = str | Mapping[str, Any]


def given_settings(parts: Mapping[str, Part], symbols: Mapping[str, Any]) -> dict[str, Any]:
    """The parts' settings and the symbols as one mapping."""
    chosen = {name: dict(part) if isinstance(part, Mapping) else {"kind": part} for name, part in parts.items()}
    flat = flat_block(chosen)
    for name, value in symbols.items():
        for key in {"nu": ("nu_t",), "eta": ("eta_tq", "eta_tk")}.get(name, (name,)):
            if key not in flat or key in chosen:
                raise UserError(f"block.{name} is no setting of the polar block.")
            if not any(key in part for part in chosen.values()):
                flat[key] = value
    return {key: value for key, value in flat.items() if key not in ("project_stream", "frozen", "backend")}


class PolarAttention(Mixer):
    """Robust directional estimate per head, tangent projection over heads, radial estimate of the magnitude.

    Noises left as None share the total variance that matches the logit range of QK-normed attention.
    """

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
        """Every part is the name of a choice or {kind: its name, setting: value, …}.

        `symbols` are the paper's (nu, eta, mu, alpha, beta, m_inf) and the finer settings of the chosen parts.
        """
        parts = dict(zip(PARTS, (inputs, transport, precision, influence, forgetting, aggregate, radial, step, output)))
        self._set_up(shape, **given_settings(parts, symbols), frozen=list(frozen), backend=backend)

    def _set_up(
        self,
        shape: MixerShape,
        kernel: str = "student",
        projection: str = "per_head",
        radial: str | bool = "none",
        radial_correlation: str = "vv",
        rotate_values: bool = True,
        frequencies: str = "shared",
        forgetting: str = "content",
        forget_bias: Value = 0.0,
        head_gate: bool = False,
        value_residual: bool = False,
        transport: str = "rotary",
        radial_flow: str = "decay",
        consensus: str | bool = "none",
        uncertainty: str | bool = "none",
        projector: str = "real",
        tie_output: bool = False,
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
        nu_t: Value = 3.0,
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
        m_eq: float = 1.0,
        mu_r: float = 0.0,
        nu_r: float = 4.0,
        eta_rq: float = 0.316,
        eta_rk: float = 0.316,
        sigma_r0: float = 0.316,
        prior_share: Value = 0.5,
        context_power: Value = 0.5,
        precision_0: Value = 1.0,
        relax_a: Value = 1.0,
        relax_b: Value = 0.1,
        widen_q: Value = 0.1,
        widen_k: Value = 0.0,
        frozen: Sequence[str] = ("alpha", "nu_t"),
        backend: str = "auto",
    ) -> None:
        given = {name: value for name, value in locals().items() if name in PARAMETERS}
        super().__init__(shape)
        self.kernel = choice("kernel", kernel, PLAIN_KERNELS)
        self.projection = cast(Projection, choice("projection", projection, PROJECTIONS))
        # Words that YAML leaves alone; `off` and `on`, which it reads as booleans, are still understood.
        self.radial = choice("radial", radial, ("none", "own", "shared"), OFF)
        self.magnitude = choice("magnitude", magnitude, ("own", "unit"), UNIT) == "own"
        self.norm_position = choice("norm_position", norm_position, ("post", "pre", "both"))
        self.norm_scope = choice("norm_scope", norm_scope, ("global", "per_head"))
        self.residual_form = check_residual_form(residual_form, kernel)
        self.radial_correlation = choice("radial_correlation", radial_correlation, RADIAL_CORRELATIONS)
        self.retract = check_retraction(retract, projection, norm_values)
        self.consensus = check_consensus(
            consensus, CONSENSUS, projection, norm_values, residual_form, radial_correlation
        )
        self.uncertainty = check_uncertainty(uncertainty, projection)
        self.projector = cast(Field, choice("projector", projector, ("real", "complex")))
        self.alpha_over_m, self.irls_steps = alpha_over_m, check_iterations(irls_steps, kernel)
        self.evidence_clamp = None if evidence_clamp is None else at_least("evidence_clamp", evidence_clamp, 0)
        self.lift, self.rotate_values, self.backend = check_lift(lift), rotate_values, backend
        self.norm_values = check_radial(self.radial, self.magnitude, norm_values)
        self.radial_flow = choice("radial_flow", radial_flow, ("decay", "equilibrium"))
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
        self.tie_output = check_tie(tie_output, norm_position, head_gate, projection, shape.layer)
        self.calibrated = not tie_output
        if tie_output:
            make_orthonormal(self.v)
        else:
            self.out = linear(heads * size, d, shape.initial.residual(heads * size))
        self.forget = forget_gate(forgetting, forget_bias, shape, raw_stream=not self.pre_norm)
        self.head_gate = HeadGate(shape, raw_stream=not self.pre_norm) if head_gate else None
        self.value_residual = ValueResidual(shape) if value_residual else None
        # One gain per channel, shared by the heads, as in QK-norm; the paper has none (|q| = |k| = r).
        learned_gain = choice("norm_gain", norm_gain, ("none", "channel")) == "channel" and self.qk is not None
        self.q_gain = nn.Parameter(torch.ones(size)) if learned_gain else None
        self.k_gain = nn.Parameter(torch.ones(size)) if learned_gain else None
        check_transport(transport, TRANSPORTS, kernel, rotate_values)
        self.transport = None if transport == "rotary" else ContentTransport(transport, shape, size)

        values = initial_values(kernel, heads, size, mu_spread, given)
        self.bounded = is_bounded(values)
        check_flow(self.radial_flow, values)
        check_carried(self.uncertainty, projection, values)
        if not self.pre_norm:
            # Of a fresh model's stream where this layer reads it: embedding plus what came before.
            self.input_rms = math.hypot(shape.stream_std, shape.initial.added_rms(d, shape.layer))
        values["gain"] = torch.tensor(1 / self.input_rms)
        self._without_effect = idle_settings(self, given, values)
        idle = idle_switches(self) | unused_here(shape.layer)
        # Magnitudes that do not decay have no rate, and variances that are not widened no share.
        idle |= {name for name in ("mu_r", "widen_q", "widen_k") if not values[name].any()}
        used = {name: value for name, value in values.items() if name not in idle}
        self.estimator = Estimator(used, frozen, PARAMETERS, FRACTIONS)

    @property
    def rotary_dim(self) -> int:
        """Real channels per head: Dh, doubled by the paper's lift to complex numbers."""
        return self.lift * self.shape.head_dim

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Algorithm 1, steps 1 to 8; steps 9 and 10 (residual, feed-forward) are the block's."""
        parameters = self.estimator.read()
        frame = CommonFrame(self.frequencies(context))
        entered = turned_inputs(self, x, parameters, frame, context)  # steps 1 and 2 at once
        if entered is not None:
            q_turned, k_turned, own, m = entered
        else:
            seen, q, k, v, m = project_inputs(self, x, parameters, context)  # step 1
            if self.transport is not None:
                frame = self.transport(seen, frame.turns, self.frequencies, context.cache)
            if self.rotate_values:  # step 2
                q_turned, k_turned, own = frame.enter(q, k, v)
            else:
                (q_turned, k_turned), own = frame.enter(q, k), v
        v_turned, m_seen = own, m
        if context.cache is not None:
            k_turned, v_turned, stored = context.cache.append(k_turned, v_turned, m)
            m_seen = m if stored is None else stored

        prior = prior_of(x, context, self.shape.layer, parameters) if self.uncertainty == "carry" else None
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
            radial=radial_noise(parameters, self.radial, self.consensus),
            radial_correlation=self.radial_correlation,
            equilibrium=parameters.get("m_eq"),
            consensus=self.consensus,
            log_query_variance=None if prior is None else prior.log_variance("q"),
            log_key_variance=None if prior is None else remembered(context, prior.log_variance("k")),
            forgotten=None if self.forget is None else self.forget.forgotten(x, context),
            bounded=self.bounded,
            documents=context.documents,
            dropout=self.shape.dropout if self.training else 0.0,
            return_weights=record is not None,
        )
        for _ in range(self.irls_steps - 1):
            call = self._refined(call, parameters)
        output = robust_attention(call, self.backend if record is None else "reference")  # steps 3 to 6
        step = self._step(own, output, m, parameters, prior, frame, context)  # step 7
        if record is not None:
            record.update(q=q, k=k, v=v, magnitude=m, params=parameters, **frame.recorded(v_turned))
            record_estimate(record, output)
            if self.kernel == "student_mle":  # the power of its robust weight, nu + 1 in `student`
                record["power"] = torch.ones_like(parameters["nu_t"])
        if self.head_gate is not None:
            step = step * self.head_gate(x).unsqueeze(-1)
        step = step.to(own.dtype)
        group = self.shape.n_head // self.shape.n_kv_head
        return tied_output(step, self.v, group) if self.tie_output else self.out(step.flatten(-2))  # step 8

    def _step(
        self,
        own: Tensor,
        output: AttentionOutput,
        m: Tensor,
        parameters: dict[str, Tensor],
        prior: Any,
        frame: CommonFrame,
        context: TokenContext,
    ) -> Tensor:
        """Step 7 in the common frame, where values and estimates are; its result (B, T, H, Dh) alone leaves it.

        Nothing in it depends on the frame: inner products within a head, and sums of vectors of one head.
        """
        alpha, record = parameters["alpha"], context.record
        if record is None and prior is None and takes_tangent_step(self):
            change = None if output.m_bar is None else parameters["beta"] * (output.m_bar - m)
            turns, evidence = frame.turns.queries, output.log_evidence
            return tangent_step(
                own, output.v_bar, alpha, *turns, self.projection, evidence, self.evidence_clamp, change
            )
        # Grouped value heads stand for each of their query heads (B, T, H, Dh).
        v_bar, wide = output.v_bar, torch.promote_types(own.dtype, torch.float32)
        group = v_bar.shape[1] // own.shape[1]
        own = (own if group == 1 else own.repeat_interleave(group, dim=1)).transpose(1, 2).to(wide)
        mean, log_evidence = v_bar.transpose(1, 2).to(wide), output.log_evidence.transpose(1, 2)
        if output.gate is not None:
            mean = gated_mean(own, mean, output.gate.transpose(1, 2))
            v_bar = mean.transpose(1, 2)
        if prior is not None:
            mean, log_evidence = prior.fuse(own, mean, log_evidence, context)
        tangent = project(own, mean, log_evidence, self.projection, self.evidence_clamp, self.projector)
        step = directional = directional_step(
            own, mean, tangent, m, alpha, alpha_over_m=self.alpha_over_m, retraction=self.retract
        )
        if output.m_bar is not None:
            delta_m = output.m_bar - m
            step = directional + radial_step(own, m, directional, parameters["beta"] * delta_m, retraction=self.retract)
        leave = frame.leave if self.rotate_values else lambda x: x
        if record is not None:
            record.update(v_bar=leave(v_bar), update=leave(directional.transpose(1, 2)))
            if output.m_bar is not None:
                record["delta_m"] = delta_m
        return leave(step.transpose(1, 2)).transpose(1, 2)

    def _refined(self, call: RobustCall, parameters: dict[str, Tensor]) -> RobustCall:
        """One iteration of reweighting (Appendix E): what the keys agree on takes the query's place."""
        of_keys = replace(call, v=call.k, radial_mode="off", radial_correlation="qk", dropout=0.0, return_weights=False)
        _, q = on_sphere(robust_attention(of_keys, self.backend).v_bar, parameters["radius"] * 0.5**0.5)
        return replace(call, q=q)

    @contextlib.contextmanager
    def unit_step(self) -> Iterator[None]:
        """With alpha = 1: W_o is scaled for that, so alpha is the size of the step and not cancelled by W_o."""
        own: Any = self.estimator["alpha"]
        self.estimator["alpha"] = Positive(torch.ones_like(own().detach()), learn=own.raw.requires_grad)
        try:
            yield
        finally:
            self.estimator["alpha"] = own

    def without_effect(self) -> set[str]:
        """Settings that the others leave no use for."""
        return self._without_effect

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """Rotated keys, values and their magnitudes."""
        return KeyValueCache(batch, self.shape.n_kv_head, length, self.rotary_dim, device, dtype, magnitude=True)

    def flops_per_token(self, context: int) -> int:
        """Projections, robust attention once per reweighting, correlations, gates, variances, content transport."""
        # A tied output is the value projection once more.
        layers = [layer for layer in (self.qk, self.v, self.v if self.tie_output else self.out) if layer is not None]
        correlation = self.radial_correlation if self.radial != "none" else None
        attention = robust_flops(context, self.shape.n_head, self.rotary_dim, correlation)
        attention += (self.irls_steps - 1) * robust_flops(context, self.shape.n_head, self.rotary_dim)
        attention += self.head_gate.flops_per_token() if self.head_gate is not None else 0
        attention += (
            self.forget.flops_per_token(self.irls_steps * mean_visible(context)) if self.forget is not None else 0
        )
        gate = self.consensus, self.radial_correlation
        attention += self.irls_steps * gate_flops(context, self.shape.n_head, self.rotary_dim, *gate)
        widened = sum(name in self.estimator for name in ("widen_q", "widen_k", "widen_k"))  # a key's also kappa
        attention += self.irls_steps * widened * widening_flops(context, self.shape.n_head)
        if self.transport is not None:  # keys and queries go in, values too and their estimates out again
            moved = (1 + self.rotate_values) * (self.shape.n_head + self.shape.n_kv_head)
            attention += self.transport.flops_per_token(moved)
        return 2 * sum(layer.weight.numel() for layer in layers) + attention
