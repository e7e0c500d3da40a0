"""Robust attention in chunks of queries, each over only the keys that causality allows: memory O(N·chunk), any device.

The forward pass keeps the output and the log-evidence; the backward pass forms each chunk's scores again. Both are
registered operators, so an outer torch.compile sees one opaque node. Shapes as in reference.py; C queries of a chunk,
K keys they see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import ALL, Plan, part, same_document
from .elementwise import backward_chunk, backward_matrices, logits_chunk, weights_chunk
from .fusion import fused
from .lag_tables import directional_tables, lag_sums, radial_tables, reversed_tables, table_slice
from .noise import MIN_MAGNITUDE, AttentionOutput, DirectionalNoise, RadialNoise
from .streaming_radial import SharedRadial, radial_estimate

# Gradient of each row of the log-tables, in their order: which sums along lags, and their sign.
TABLE_ROWS = {"g": 1, "gated": -1, "own": 1, "floor": 1, "decay": 1}


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
    q, k, v, shape = q.contiguous(), k.contiguous(), v.contiguous(), shape.detach()
    q2, k2 = _squares(q, k)
    tables = reversed_tables(log_tables, plan.chunk)
    out, log_evidence = torch.empty_like(q), torch.empty_like(q2)
    radial = None if log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    m_bar = q2.new_empty(0) if radial is None else torch.empty_like(q2)
    scratches = [plan.scratch() for _ in range(1 + decay_values)]
    score = fused(logits_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys)
    weigh = fused(weights_chunk, plan.work)
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            weights, *decayed = (plan.scores_view(s, rows, queries, keys) for s in scratches)  # first q·k, then L, then A
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
    q, k, v, d_out, shape = q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous(), shape.detach()
    q2, k2 = _squares(q, k)
    tables = reversed_tables(log_tables, plan.chunk)
    delta = (d_out * out).sum(-1) - d_log_evidence
    radial = None if log_radial_decay is None else SharedRadial(plan, v, m, log_radial_decay)
    if radial is not None:
        delta += d_m_bar * m_bar
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_k2, d_shape = torch.zeros_like(k2), torch.zeros_like(shape)
    d_m2 = q.new_empty(0) if m2 is None else torch.zeros_like(m2)
    names = backward_matrices(kernel, m2 is not None, decay_keys, decay_values)
    sums = {name: q.new_zeros(plan.heads, plan.keys) for name in names if name in TABLE_ROWS}
    scratches = [plan.scratch() for _ in range(2 + len(names))]
    gradients = fused(
        backward_chunk, plan.work, half=plan.size / 2, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values
    )
    with torch.no_grad():
        for number, (rows, queries, keys) in enumerate(plan):
            dots, grads, *pairs = (plan.scores_view(s, rows, queries, keys) for s in scratches)
            pairs = dict(zip(names, pairs))
            queries_of_chunk, d_out_of_chunk = (_flat(x[rows, :, queries], plan.groups) for x in (q, d_out))
            if kernel != "gaussian":
                torch.bmm(queries_of_chunk, _keys(k, rows, keys).mT, out=_flat(dots, plan.groups))
            torch.bmm(d_out_of_chunk, _keys(v, rows, keys).mT, out=_flat(grads, plan.groups))
            keep = _keep(dots.shape, dropout, seed, number, q)
            if keep is not None:
                grads.mul_(keep)
            if radial is not None:
                grads.add_(d_m_bar[rows, :, queries, None] * radial.predict(rows, queries, keys)[:, None])
            gradients(
                dots, grads, pairs, part(q2, rows, ALL, queries),
                part(k2, rows, ALL, slice(keys)), part(m2, rows, slice(keys)), shape,
                part(log_evidence, rows, ALL, queries), part(delta, rows, ALL, queries),
                same_document(documents, rows, queries, keys, plan.queries),
                table_slice(tables, plan.keys, keys, dots.shape[2]),
            )  # fmt: skip
            applied = pairs["applied"]
            if radial is not None:
                radial.differentiate(rows, queries, keys, (applied * d_m_bar[rows, :, queries, None]).sum(1))
            if keep is not None:
                applied.mul_(keep)
            _keys(dv, rows, keys).baddbmm_(_flat(applied, plan.groups).mT, d_out_of_chunk)
            for name, table in sums.items():
                table[:, plan.keys - keys :] += lag_sums(pairs[name])
            if m2 is not None:
                d_m2[rows, :keys] += pairs["own"].sum((1, 2))
            if kernel == "gaussian":
                dq[rows, :, queries] = 0
                continue
            d_dots = _flat(pairs["d_dots"], plan.groups)
            _keys(dk, rows, keys).baddbmm_(d_dots.mT, queries_of_chunk)
            through_dots = torch.bmm(d_dots, _keys(k, rows, keys)).view(*dots.shape[:3], plan.size)
            if decay_keys:
                d_k2[rows, :, :keys] += pairs["d_k2"].sum(2)
                d_q2 = pairs["d_r2"].sum(-1)
            else:
                d_k2[rows, :, :keys] -= pairs["d_dots"].sum(2) / 2
                d_q2 = pairs["d_dots"].sum(-1) / -2
            dq[rows, :, queries] = through_dots + 2 * d_q2[..., None] * q[rows, :, queries]
            d_shape += pairs["shape"].sum((0, 2, 3))
        dk += 2 * d_k2.view(plan.batch, plan.groups, -1, plan.keys).sum(2)[..., None] * k
        if m2 is not None:
            d_m2 /= m2
            sums["g"] = sums["gated"] + sums["own"] + sums["floor"]
        d_tables = torch.stack([sign * sums[name] for name, sign in TABLE_ROWS.items() if name in sums])
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
