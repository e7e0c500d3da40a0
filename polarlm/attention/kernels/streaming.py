"""Robust attention in chunks of queries, each over only the keys that causality allows: memory O(N·chunk), any device.

The forward pass keeps the output and the log-evidence; the backward pass forms each chunk's scores again. Both are
registered operators, so an outer torch.compile sees one opaque node. Shapes as in reference.py; C queries of a chunk,
K keys they see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarlm.geometry.precision import MIN_MAGNITUDE

from .call import AttentionOutput, RobustCall
from .chunks import ALL, Plan, part, same_document
from .elementwise import backward_chunk, logits_chunk, weights_chunk
from .fusion import fused
from .lag_tables import (
    directional_tables,
    noise_gradient,
    radial_tables,
    reverse,
    reversed_tables,
    slope_tables,
    table_slice,
)
from .noise import NOISE_ROWS, DirectionalNoise, noise_of_rows
from .operator import differentiable
from .streaming_radial import SharedRadial, radial_estimate

# What the operator differentiates, in the order in which its backward pass returns the gradients.
DIFFERENTIABLE = ("q", "k", "v", "m2", "noise", "m", "log_radial_decay")


def _flat(x: Tensor, groups: int) -> Tensor:
    """(b,H,C,·) -> (b·G, (H/G)·C, ·): the query heads of a group share one matrix product with its keys."""
    return x.reshape(x.shape[0] * groups, -1, x.shape[-1])


def _keys(x: Tensor, rows: slice, keys: int) -> Tensor:
    return x[rows, :, :keys].flatten(0, 1)


def _tables(noise: DirectionalNoise, plan: Plan, magnitude: bool, decay: bool) -> Tensor:
    tables = directional_tables(noise, plan.keys, plan.size / 2, magnitude, decay, plan.like.dtype)
    return reversed_tables(tables, plan.chunk)


def _squares(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.square().sum(-1), k.square().sum(-1).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _keep(shape: torch.Size, dropout: float, seed: Tensor | None, chunk_number: int, like: Tensor) -> Tensor | None:
    """Dropout factors 0 or 1/(1−p) of one chunk, the same in both passes."""
    if seed is None:
        return None
    generator = torch.Generator(like.device).manual_seed(int(seed) + chunk_number)
    kept = torch.rand(shape, generator=generator, device=like.device) >= dropout
    return kept.to(like.dtype) / (1 - dropout)


def _gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    (d_out, d_log_evidence, d_m_bar), (out, log_evidence, m_bar) = gradients, outputs
    found = streaming_backward(d_out, d_log_evidence, d_m_bar, out, log_evidence, m_bar, **given)
    return dict(zip(DIFFERENTIABLE, found))


@differentiable("polarlm::streaming_forward", _gradient)
def streaming_forward(
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, noise: Tensor,
    m: Tensor | None, log_radial_decay: Tensor | None, documents: Tensor | None,
    seed: Tensor | None, kernel: str, decay_keys: bool, decay_values: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh), log-evidence (B,H,T), and radial estimate per head (B,H,T) where `log_radial_decay` is given.

    `noise` (7, H) has the rows of NOISE_ROWS, `m2` (B,S) is the squared magnitude of κ; the magnitude `m` (B,S) and the
    log-table (1,1,S) of its decay ask for the radial estimate Σ_j A_ij c_ij m̂_ij with these weights (radial mode
    `shared`).
    """
    plan = Plan(q, k)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    parameters, shape = noise_of_rows(noise)
    q2, k2 = _squares(q, k)
    tables = _tables(parameters, plan, m2 is not None, decay_keys or decay_values)
    out, log_evidence = torch.empty_like(q), torch.empty_like(q2)
    radial = None if m is None or log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    m_bar = q2.new_empty(0) if radial is None else torch.empty_like(q2)
    scratches = [plan.scratch() for _ in range(1 + decay_values)]
    score = fused(logits_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys)
    weigh = fused(weights_chunk, plan.work)
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            weights, *decayed = (
                plan.scores_view(s, rows, queries, keys) for s in scratches
            )  # first q·k, then L, then A
            if kernel != "gaussian":
                torch.bmm(
                    _flat(q[rows, :, queries], plan.groups), _keys(k, rows, keys).mT, out=_flat(weights, plan.groups)
                )
            m2_of_keys = part(m2, rows, slice(keys))
            at_lags = table_slice(tables, plan.keys, keys, weights.shape[2])
            score(
                weights, part(q2, rows, ALL, queries), part(k2, rows, ALL, slice(keys)), m2_of_keys,
                shape, same_document(documents, rows, queries, keys, plan.queries), at_lags,
            )  # fmt: skip
            top = weights.amax(-1, keepdim=True)
            weigh(weights, decayed[0] if decay_values else None, top, m2_of_keys, at_lags)
            total = weights.sum(-1)
            if radial is not None:
                predicted = radial.predict(rows, queries, keys)
                m_bar[rows, :, queries] = (weights * predicted[:, None]).sum(-1) / total
            applied = decayed[0] if decay_values else weights
            keep = _keep(weights.shape, dropout, seed, number, q)
            if keep is not None:
                applied.mul_(keep)
            estimate = torch.bmm(_flat(applied, plan.groups), _keys(v, rows, keys)).view(*weights.shape[:3], plan.size)
            torch.div(estimate, total[..., None], out=out[rows, :, queries])
            log_evidence[rows, :, queries] = top[..., 0] + total.log()
    return out, log_evidence, m_bar


@streaming_forward.register_fake
def _(q, k, v, m2, noise, m, log_radial_decay, *_options):
    m_bar = q.new_empty(0) if log_radial_decay is None else q.new_empty(q.shape[:3])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3]), m_bar


@torch.library.custom_op("polarlm::streaming_backward", mutates_args=())
def streaming_backward(
    d_out: Tensor, d_log_evidence: Tensor, d_m_bar: Tensor, out: Tensor, log_evidence: Tensor, m_bar: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, noise: Tensor,
    m: Tensor | None, log_radial_decay: Tensor | None, documents: Tensor | None,
    seed: Tensor | None, kernel: str, decay_keys: bool, decay_values: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the inputs that DIFFERENTIABLE names, in its order; empty where there is no input."""
    plan = Plan(q, k)
    q, k, v, d_out = q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous()
    parameters, shape = noise_of_rows(noise)
    q2, k2 = _squares(q, k)
    tables = _tables(parameters, plan, m2 is not None, decay_keys or decay_values)
    slopes = reverse(slope_tables(parameters, plan.keys, q.dtype), plan.chunk)
    delta = torch.linalg.vecdot(d_out, out) - d_log_evidence
    radial = None if m is None or log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    if radial is not None:
        delta += d_m_bar * m_bar
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_k2 = torch.zeros_like(k2)
    d_m2 = q.new_empty(0) if m2 is None else torch.zeros_like(m2)
    totals: dict[str, Tensor] = {}
    scratches = [plan.scratch() for _ in range(5 if decay_keys else 4)]
    gradients = fused(
        backward_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values
    )
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            dots, grads, d_dots, own, *per_key = (plan.scores_view(s, rows, queries, keys) for s in scratches)
            queries_of_chunk, d_out_of_chunk = (_flat(x[rows, :, queries], plan.groups) for x in (q, d_out))
            if kernel != "gaussian":
                torch.bmm(queries_of_chunk, _keys(k, rows, keys).mT, out=_flat(dots, plan.groups))
            torch.bmm(d_out_of_chunk, _keys(v, rows, keys).mT, out=_flat(grads, plan.groups))
            keep = _keep(dots.shape, dropout, seed, number, q)
            if keep is not None:
                grads.mul_(keep)
            if radial is not None:
                grads.add_(d_m_bar[rows, :, queries, None] * radial.predict(rows, queries, keys)[:, None])
            applied, d_q2, sums = gradients(
                dots, grads, d_dots, own, per_key[0] if decay_keys else None, part(q2, rows, ALL, queries),
                part(k2, rows, ALL, slice(keys)), part(m2, rows, slice(keys)), shape,
                part(log_evidence, rows, ALL, queries), part(delta, rows, ALL, queries),
                same_document(documents, rows, queries, keys, plan.queries),
                table_slice(tables, plan.keys, keys, dots.shape[2]),
                table_slice(slopes, plan.keys, keys, dots.shape[2]),
            )  # fmt: skip
            for name, total in zip(sums, torch.stack(list(sums.values())).sum((1, 3))):
                totals[name] = total + totals.get(name, 0)
            if radial is not None:
                radial.differentiate(rows, queries, keys, (applied * d_m_bar[rows, :, queries, None]).sum(1))
            if keep is not None:
                applied.mul_(keep)
            _keys(dv, rows, keys).baddbmm_(_flat(applied, plan.groups).mT, d_out_of_chunk)
            if m2 is not None:
                d_m2[rows, :keys] += own.sum((1, 2))
            if kernel == "gaussian":
                dq[rows, :, queries] = 0
                continue
            flat = _flat(d_dots, plan.groups)
            _keys(dk, rows, keys).baddbmm_(flat.mT, queries_of_chunk)
            through_dots = torch.bmm(flat, _keys(k, rows, keys)).view(*dots.shape[:3], plan.size)
            d_k2[rows, :, :keys] += per_key[0].sum(2) if decay_keys else d_dots.sum(2) / -2
            torch.addcmul(through_dots, d_q2[..., None], q[rows, :, queries], value=2, out=dq[rows, :, queries])
        dk.addcmul_(k, d_k2.view(plan.batch, plan.groups, -1, plan.keys).sum(2)[..., None], value=2)
        if m2 is not None:
            d_m2 /= m2
        d_noise = noise_gradient(totals, parameters)
    d_m, d_radial_decay = q.new_empty(0), q.new_empty(0)
    if radial is not None:
        dv += radial.d_value.unflatten(-1, (plan.groups, -1)).transpose(1, 2)
        d_m, d_radial_decay = radial.d_m, radial.d_decay.flip(-1)
    return dq, dk, dv, d_m2, torch.stack([d_noise[row] for row in NOISE_ROWS]), d_m, d_radial_decay


@streaming_backward.register_fake
def _(d_out, d_log_evidence, d_m_bar, out, log_evidence, m_bar, q, k, v, m2, noise, m, log_radial_decay, *_options):
    inputs = (q, k, v, m2, noise, m, log_radial_decay)
    contiguous = torch.contiguous_format
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in inputs)


def streaming_obstacle(call: RobustCall) -> str | None:
    """Why the streaming backend cannot take a call, or None."""
    if call.return_weights:
        return "it never holds the weights that were asked for"
    if call.radial_mode == "shared" and call.decay_values:
        return "it does not combine block.radial=shared with decaying values"
    if call.residual_form == "dot":
        return "it only knows block.residual_form=full"
    return None


def streaming_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention in O(N·chunk) memory."""
    dtype, m, log_radial_decay = call.score_dtype, None, None
    m2 = None if call.magnitude is None else call.magnitude.to(dtype).clamp_min(MIN_MAGNITUDE).square()
    if call.radial_mode == "shared":
        assert call.radial is not None and call.magnitude is not None, "RobustCall.check sees to it"
        m, log_radial_decay = call.magnitude.to(dtype), radial_tables(call.radial, call.k.shape[2], dtype)[-1:]
    v_bar, log_evidence, m_bar = streaming_forward(
        *(x.to(dtype) for x in (call.q, call.k, call.v)),
        m2,
        call.noise.rows(call.kernel, dtype),
        m,
        log_radial_decay,
        call.documents,
        # Drawn on the host, so that reading it in both passes does not wait for the device.
        torch.randint(2**62, (1,)) if call.dropout else None,
        call.kernel,
        call.decay_keys and call.kernel != "gaussian",  # the Gaussian kernel does not look at the residual
        call.decay_values,
        call.dropout,
    )
    m_bar = m_bar.mean(1) if call.radial_mode == "shared" else radial_estimate(call)
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar)
