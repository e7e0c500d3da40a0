"""Robust attention in chunks of queries, each over only the keys that causality allows: memory O(N·chunk), any device.

The forward pass keeps the output and the log-evidence; the backward pass forms each chunk's scores again. Both are
registered operators, so an outer torch.compile sees one opaque node. Shapes as in reference.py; C queries of a chunk,
K keys they see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import ALL, Plan, part, same_document
from .elementwise import backward_chunk, forward_chunk
from .fusion import fused
from .lag_tables import directional_tables, lag_sums, radial_tables, reversed_tables, table_slice
from .noise import MIN_MAGNITUDE, AttentionOutput, DirectionalNoise, RadialNoise
from .streaming_radial import SharedRadial, radial_estimate


def _flat(x: Tensor, groups: int) -> Tensor:
    """(b,H,C,·) -> (b·G, (H/G)·C, ·): the query heads of a group share one matrix product with its keys."""
    return x.reshape(x.shape[0] * groups, -1, x.shape[-1])


def _keys(x: Tensor, rows: slice, keys: int) -> Tensor:
    return x[rows, :, :keys].flatten(0, 1)


def _squares(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.square().sum(-1), k.square().sum(-1).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _keep(shape: torch.Size, dropout: float, seed: Tensor | None, chunk_number: int, like: Tensor) -> Tensor | None:
    """Dropout factors 0 or 1/(1−p) of one chunk, the same in both passes."""
    if dropout == 0:
        return None
    generator = torch.Generator(like.device).manual_seed(int(seed) + chunk_number)
    kept = torch.rand(shape, generator=generator, device=like.device) >= dropout
    return kept.to(like.dtype) / (1 - dropout)


@torch.library.custom_op("polarlm::streaming_forward", mutates_args=())
def streaming_forward(
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, log_tables: Tensor, shape: Tensor,
    m: Tensor | None, log_radial_decay: Tensor | None, documents: Tensor | None,
    seed: Tensor | None, kernel: str, decay_keys: bool, decay_values: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh), log-evidence (B,H,T), and radial estimate per head (B,H,T) where `log_radial_decay` is given.

    `shape` (H,) is ν or τ, `m2` (B,S) the squared magnitude of κ; the magnitude `m` (B,S) and the log-table (1,1,S) of
    its decay ask for the radial estimate Σ_j A_ij c_ij m̂_ij with these weights (radial mode `shared`).
    """
    plan = Plan(q, k)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    q2, k2 = _squares(q, k)
    tables = reversed_tables(log_tables, plan.chunk)
    out, log_evidence = torch.empty_like(q), torch.empty_like(q2)
    radial = None if log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    m_bar = q2.new_empty(0) if radial is None else torch.empty_like(q2)
    scratch = plan.scratch()
    weigh = fused(
        forward_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values
    )
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            weights = plan.scores_view(scratch, rows, queries, keys)
            flat = _flat(weights, plan.groups)
            if kernel != "gaussian":
                torch.bmm(_flat(q[rows, :, queries], plan.groups), _keys(k, rows, keys).mT, out=flat)
            top, total = weigh(
                weights, part(q2, rows, ALL, queries), part(k2, rows, ALL, slice(keys)), part(m2, rows, slice(keys)),
                shape, same_document(documents, rows, queries, keys, plan.queries),
                table_slice(tables, plan.keys, keys, weights.shape[2]),
            )  # fmt: skip
            if radial is not None:
                predicted = radial.predict(rows, queries, keys)
                m_bar[rows, :, queries] = (weights * predicted[:, None]).sum(-1) / total
            keep = _keep(weights.shape, dropout, seed, number, q)
            if keep is not None:
                weights.mul_(keep)
            estimate = torch.bmm(flat, _keys(v, rows, keys)).view(*weights.shape[:3], plan.size)
            torch.div(estimate, total[..., None], out=out[rows, :, queries])
            log_evidence[rows, :, queries] = top + total.log()
    return out, log_evidence, m_bar


@streaming_forward.register_fake
def _(
    q, k, v, m2, log_tables, shape, m, log_radial_decay, documents, seed, kernel, decay_keys, decay_values, dropout
):  # fmt: skip
    m_bar = q.new_empty(0) if log_radial_decay is None else q.new_empty(q.shape[:3])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3]), m_bar


@torch.library.custom_op("polarlm::streaming_backward", mutates_args=())
def streaming_backward(
    d_out: Tensor, d_log_evidence: Tensor, d_m_bar: Tensor, out: Tensor, log_evidence: Tensor, m_bar: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, log_tables: Tensor, shape: Tensor,
    m: Tensor | None, log_radial_decay: Tensor | None, documents: Tensor | None,
    seed: Tensor | None, kernel: str, decay_keys: bool, decay_values: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, m2, the log-tables, `shape`, m and the radial decay; empty where there is no input."""
    plan = Plan(q, k)
    q, k, v, d_out = q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous()
    q2, k2 = _squares(q, k)
    tables = reversed_tables(log_tables, plan.chunk)
    delta = (d_out * out).sum(-1) - d_log_evidence
    radial = None if log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    if radial is not None:
        delta += d_m_bar * m_bar
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_k2, d_shape = torch.zeros_like(k2), torch.zeros_like(shape)
    d_m2 = q.new_empty(0) if m2 is None else torch.zeros_like(m2)
    sums = log_tables.new_zeros(2 + (m2 is not None) + (decay_keys or decay_values), plan.heads, plan.keys)
    dots_scratch, grads_scratch, lag_scratch = plan.scratch(), plan.scratch(), plan.scratch(len(sums), extra_rows=1)
    key_scratch = plan.scratch() if decay_keys else None
    gradients = fused(
        backward_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values
    )
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            dots, grads = (plan.scores_view(s, rows, queries, keys) for s in (dots_scratch, grads_scratch))
            per_key = plan.scores_view(key_scratch, rows, queries, keys) if decay_keys else None
            batch, heads, rows_of_chunk, _ = dots.shape
            per_lag = lag_scratch[: len(sums) * batch * heads * (rows_of_chunk + 1) * keys]
            per_lag = per_lag.view(len(sums), batch, heads, rows_of_chunk + 1, keys)
            per_lag[..., 0, :] = 0
            flat_dots, flat_grads = _flat(dots, plan.groups), _flat(grads, plan.groups)
            queries_of_chunk, d_out_of_chunk = (_flat(x[rows, :, queries], plan.groups) for x in (q, d_out))
            if kernel != "gaussian":
                torch.bmm(queries_of_chunk, _keys(k, rows, keys).mT, out=flat_dots)
            torch.bmm(d_out_of_chunk, _keys(v, rows, keys).mT, out=flat_grads)
            keep = _keep(dots.shape, dropout, seed, number, q)
            if keep is not None:
                grads.mul_(keep)
            if radial is not None:
                grads.add_(d_m_bar[rows, :, queries, None] * radial.predict(rows, queries, keys)[:, None])
            q2_sum, shape_sum = gradients(
                dots, grads, per_lag[..., 1:, :], per_key, part(q2, rows, ALL, queries),
                part(k2, rows, ALL, slice(keys)), part(m2, rows, slice(keys)), shape,
                part(log_evidence, rows, ALL, queries), part(delta, rows, ALL, queries),
                same_document(documents, rows, queries, keys, plan.queries),
                table_slice(tables, plan.keys, keys, rows_of_chunk),
            )  # fmt: skip
            if radial is not None:
                radial.differentiate(rows, queries, keys, (dots * d_m_bar[rows, :, queries, None]).sum(1))
            if keep is not None:
                dots.mul_(keep)
            dv[rows, :, :keys] += torch.bmm(flat_dots.mT, d_out_of_chunk).view(batch, plan.groups, keys, -1)
            sums[..., plan.keys - keys :] += lag_sums(per_lag)
            if m2 is not None:
                d_m2[rows, :keys] += per_lag[1, :, :, 1:].sum((1, 2))
            if kernel != "gaussian":
                dk[rows, :, :keys] += torch.bmm(flat_grads.mT, queries_of_chunk).view(batch, plan.groups, keys, -1)
                d_k2[rows, :, :keys] -= (per_key if decay_keys else grads).sum(2) / 2
                through_dots = torch.bmm(flat_grads, _keys(k, rows, keys)).view(*dots.shape[:3], plan.size)
                dq[rows, :, queries] = through_dots + 2 * q2_sum[..., None] * q[rows, :, queries]
                d_shape += shape_sum.sum((0, 2))
        dk += 2 * d_k2.view(plan.batch, plan.groups, -1, plan.keys).sum(2)[..., None] * k
        if m2 is not None:
            d_m2 /= m2
            own, floor = sums[1:2], sums[2:3]
            d_tables = torch.cat([sums[:1], own + floor - sums[:1], own, floor, sums[3:]])
        else:
            d_tables = torch.cat([sums[:1], -sums[1:2], sums[2:]])
    d_m, d_radial_decay = q.new_empty(0), q.new_empty(0)
    if radial is not None:
        dv += radial.d_value.unflatten(-1, (plan.groups, -1)).transpose(1, 2)
        d_m, d_radial_decay = radial.d_m, radial.d_decay.flip(-1)
    return dq, dk, dv, d_m2, d_tables.flip(-1), d_shape, d_m, d_radial_decay


@streaming_backward.register_fake
def _(
    d_out, d_log_evidence, d_m_bar, out, log_evidence, m_bar, q, k, v, m2, log_tables, shape, m, log_radial_decay,
    documents, seed, kernel, decay_keys, decay_values, dropout,
):  # fmt: skip
    inputs = (q, k, v, m2, log_tables, shape, m if log_radial_decay is not None else None, log_radial_decay)
    contiguous = torch.contiguous_format
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in inputs)


def _save(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:10], inputs[10:]
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx, *gradients: Tensor):
    tensors = ctx.saved_tensors
    found = streaming_backward(*gradients, *tensors, *ctx.options)
    inputs = tensors[3:11]
    return *(None if x is None else g for x, g in zip(inputs, found)), *[None] * (2 + len(ctx.options))


streaming_forward.register_autograd(_differentiate, setup_context=_save)


def streaming_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    *,
    kernel: str,
    decay_keys: bool,
    decay_values: bool,
    radial: RadialNoise | None,
    radial_mode: str,
    documents: Tensor | None,
    dropout: float,
) -> AttentionOutput:
    """Robust attention in O(N·chunk) memory; arguments as in `robust_attention`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    decay_keys = decay_keys and kernel != "gaussian"  # the Gaussian kernel does not look at the residual
    lags = k.shape[2]
    m = None if magnitude is None else magnitude.to(dtype)
    m2 = None if m is None else m.clamp_min(MIN_MAGNITUDE).square()
    tables = directional_tables(noise, lags, q.shape[3] / 2, m is not None, decay_keys or decay_values, dtype)
    shape = {"student": noise.nu, "exponential": noise.tau, "gaussian": torch.ones_like(noise.mu)}[kernel].to(dtype)
    shared = (m, radial_tables(radial, lags, dtype)[-1:]) if radial_mode == "shared" else (None, None)
    # Drawn on the host, so that reading it in both passes does not wait for the device.
    seed = torch.randint(2**62, (1,)) if dropout else None
    wide = (x.to(dtype) for x in (q, k, v))
    v_bar, log_evidence, m_bar = streaming_forward(
        *wide, m2, tables, shape, *shared, documents, seed, kernel, decay_keys, decay_values, dropout
    )
    if radial_mode == "own":
        m_bar = radial_estimate(v, m, radial, documents, q.shape[2])
    else:
        m_bar = m_bar.mean(1) if radial_mode == "shared" else None
    return AttentionOutput(v_bar.to(v.dtype), log_evidence, m_bar)
