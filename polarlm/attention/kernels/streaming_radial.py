"""The radial channel in chunks: m̄_i = Σ_j w_ij c_ij m̂_ij with c = ⟨v_i,v_j⟩/D over all heads, memory O(N·chunk).

`own` weights come from the radial likelihood and have their own pass; `shared` ones are the directional weights, so
the directional pass calls `SharedRadial` while it has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import RobustCall
from .chunks import Plan, part, same_document
from .elementwise import exp, log1p
from .fusion import fused
from .lag_tables import lag_sums, radial_tables, reversed_tables, table_slice, windows
from .operator import differentiable

RHO, RHO_QUERY, DECAY = range(3)
TABLE_ROWS = ("log_rho", "log_rho_query", "log_decay")


class SharedRadial:
    """The radial prediction c_ij m̂_ij of a chunk, and the way back, for weights that the directional channel made."""

    def __init__(self, plan: Plan, v: Tensor, m: Tensor, log_decay: Tensor) -> None:
        self.value = v.transpose(1, 2).flatten(2)  # (B,S,D)
        self.m, self.first, self.lags = m, plan.keys - plan.queries, plan.keys
        self.decay = reversed_tables(log_decay.expand(2, 1, -1), plan.chunk)[1:]
        self.d_value, self.d_m, self.d_decay = (torch.zeros_like(x) for x in (self.value, m, log_decay))

    def _cosine(self, rows: slice, queries: slice, keys: int) -> Tensor:
        """c_ij e^{−μ_rΔ}, (b,C,K)."""
        own = self.value[rows, self.first + queries.start : self.first + queries.stop]
        at_lag = windows(table_slice(self.decay, self.lags, keys, own.shape[1]), keys)[0]
        return own @ self.value[rows, :keys].mT * at_lag / own.shape[-1]

    def predict(self, rows: slice, queries: slice, keys: int) -> Tensor:
        return self._cosine(rows, queries, keys) * self.m[rows, None, :keys]

    def differentiate(self, rows: slice, queries: slice, keys: int, d_predicted: Tensor) -> None:
        own = slice(self.first + queries.start, self.first + queries.stop)
        cosine, m = self._cosine(rows, queries, keys), self.m[rows, None, :keys]
        d_m = d_predicted * cosine
        self.d_m[rows, :keys] += d_m.sum(1)
        self.d_decay[0, :, self.lags - keys :] += lag_sums((d_m * m)[:, None])
        at_lag = windows(table_slice(self.decay, self.lags, keys, d_m.shape[1]), keys)[0]
        d_dots = d_predicted * m * at_lag / self.value.shape[-1]
        self.d_value[rows, own] += d_dots @ self.value[rows, :keys]
        self.d_value[rows, :keys] += d_dots.mT @ self.value[rows, own]


def _radial_scores(dots, m_key, m_query, nu, same_document, tables, size):
    """Prediction z = c m̂, residual, y = ρ̃ d²/ν and the logits; at_lag are the tables seen by each pair."""
    at_lag = windows(tables, dots.shape[-1])[:, 0]
    z = dots * (at_lag[DECAY] / size) * m_key[:, None, :]
    residual = z - m_query[..., None]
    y = at_lag[RHO_QUERY] * residual.square() / nu
    log_rho = at_lag[RHO]
    if same_document is not None:
        log_rho = torch.where(same_document, log_rho, -torch.inf)
    return at_lag, z, residual, y, log_rho - (nu + 1) * log1p(y)


def radial_logits_chunk(dots, logits, m_key, m_query, nu, same_document, tables, *, size):
    """Fills `logits`, and turns dot products into predictions z in place."""
    _, z, _, _, found = _radial_scores(dots, m_key, m_query, nu, same_document, tables, size)
    logits.copy_(found)
    dots.copy_(z)


def radial_weights_chunk(logits, z, top):
    """Turns logits into weights, not normalised, and predictions into weighted predictions, in place."""
    weights = exp(logits - top)
    z.copy_(weights * z)
    logits.copy_(weights)


def radial_backward_chunk(
    dots, out, m_key, m_query, nu, same_document, tables, m_bar, log_evidence, d_m_bar, *, size
):  # fmt: skip
    """Fills the matrices of `out`: gradients of the dot products, of m_i, m_j, ν, and of the log-tables."""
    at_lag, z, residual, y, logits = _radial_scores(dots, m_key, m_query, nu, same_document, tables, size)
    weights = exp(logits - log_evidence[..., None])
    up = d_m_bar[..., None]
    g = weights * up * (z - m_bar[..., None])  # ∂L
    g_slope = g * ((nu + 1) / (1 + y))  # −∂/∂y
    d_m_query = 2 * g_slope * at_lag[RHO_QUERY] * residual / nu  # the residual's, with its sign turned
    d_z = weights * up - d_m_query
    decay = at_lag[DECAY] / size
    out["dots"].copy_(d_z * decay * m_key[:, None, :])
    out["m_query"].copy_(d_m_query)
    out["m_key"].copy_(d_z * dots * decay)
    out["nu"].copy_(g_slope * y / nu - g * log1p(y))
    for row, value in zip(TABLE_ROWS, (g, -g_slope * y, d_z * z)):
        out[row].copy_(value)


def _gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    (d_m_bar, _unused), (m_bar, log_evidence) = gradients, outputs
    found = radial_backward(d_m_bar, m_bar, log_evidence, **given)
    return dict(zip(("value", "m", "log_tables", "nu"), found))


@differentiable("polarlm::radial_forward", _gradient)
def radial_forward(
    value: Tensor, m: Tensor, log_tables: Tensor, nu: Tensor, documents: Tensor | None, queries: int
) -> tuple[Tensor, Tensor]:
    """m̄ and radial log-evidence, both (B,T), of the last `queries` of value (B,S,D) and m (B,S)."""
    plan = Plan(value[:, None, -queries:], value[:, None])
    value, first = value.contiguous(), value.shape[1] - queries
    m_bar, log_evidence = (m.new_empty(plan.batch, queries) for _ in range(2))
    tables = reversed_tables(log_tables, plan.chunk)
    scratches = plan.scratch(), plan.scratch()
    score = fused(radial_logits_chunk, plan.work, size=plan.size)
    weigh = fused(radial_weights_chunk, plan.work)
    with torch.no_grad():
        for rows, chunk, keys in plan:
            logits, z = (plan.scores_view(scratch, rows, chunk, keys)[:, 0] for scratch in scratches)
            own = slice(first + chunk.start, first + chunk.stop)
            torch.bmm(value[rows, own], value[rows, :keys].mT, out=z)
            score(
                z, logits, part(m, rows, slice(keys)), part(m, rows, own), nu.detach(),
                same_document(documents, rows, chunk, keys, queries),
                table_slice(tables, plan.keys, keys, z.shape[1]),
            )  # fmt: skip
            top = logits.amax(-1, keepdim=True)
            weigh(logits, z, top)
            total = logits.sum(-1)
            m_bar[rows, chunk] = z.sum(-1) / total
            log_evidence[rows, chunk] = top[..., 0] + total.log()
    return m_bar, log_evidence


@radial_forward.register_fake
def _(value, m, log_tables, nu, documents, queries):
    return m.new_empty(m.shape[0], queries), m.new_empty(m.shape[0], queries)


@torch.library.custom_op("polarlm::radial_backward", mutates_args=())
def radial_backward(
    d_m_bar: Tensor, m_bar: Tensor, log_evidence: Tensor, value: Tensor, m: Tensor, log_tables: Tensor, nu: Tensor,
    documents: Tensor | None, queries: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of value, m, the log-tables and ν."""
    plan = Plan(value[:, None, -queries:], value[:, None])
    value, first = value.contiguous(), value.shape[1] - queries
    d_value, d_m, d_nu = torch.zeros_like(value), torch.zeros_like(m), torch.zeros_like(nu)
    sums = log_tables.new_zeros(log_tables.shape)
    tables = reversed_tables(log_tables, plan.chunk)
    names = ("dots", "m_query", "m_key", "nu", *TABLE_ROWS)
    scratches = [plan.scratch() for _ in range(1 + len(names))]
    gradients = fused(radial_backward_chunk, plan.work, size=plan.size)
    with torch.no_grad():
        for rows, chunk, keys in plan:
            dots, *pairs = (plan.scores_view(scratch, rows, chunk, keys)[:, 0] for scratch in scratches)
            found = dict(zip(names, pairs))
            own = slice(first + chunk.start, first + chunk.stop)
            torch.bmm(value[rows, own], value[rows, :keys].mT, out=dots)
            gradients(
                dots, found, part(m, rows, slice(keys)), part(m, rows, own), nu.detach(),
                same_document(documents, rows, chunk, keys, queries),
                table_slice(tables, plan.keys, keys, dots.shape[1]),
                part(m_bar, rows, chunk), part(log_evidence, rows, chunk), part(d_m_bar, rows, chunk),
            )  # fmt: skip
            d_value[rows, own].baddbmm_(found["dots"], value[rows, :keys])
            d_value[rows, :keys].baddbmm_(found["dots"].mT, value[rows, own])
            d_m[rows, own] += found["m_query"].sum(-1)
            d_m[rows, :keys] += found["m_key"].sum(1)
            d_nu += found["nu"].sum()
            for table, row in zip(sums, TABLE_ROWS):
                table[:, plan.keys - keys :] += lag_sums(found[row][:, None])
    return d_value, d_m, sums.flip(-1), d_nu


@radial_backward.register_fake
def _(d_m_bar, m_bar, log_evidence, value, m, log_tables, nu, documents, queries):
    contiguous = torch.contiguous_format
    return (*(torch.empty_like(x, memory_format=contiguous) for x in (value, m, log_tables)), torch.empty_like(nu))


def radial_estimate(call: RobustCall) -> Tensor | None:
    """m̄ (B,T), weighted by the radial likelihood itself (radial mode `own`); None in the other modes."""
    if call.radial_mode != "own":
        return None
    noise, magnitude, dtype = call.radial, call.magnitude, call.score_dtype
    assert noise is not None and magnitude is not None, "RobustCall.check sees to it"
    value = call.v.to(dtype).transpose(1, 2).flatten(2)
    tables = radial_tables(noise, call.k.shape[2], dtype)
    m_bar, _ = radial_forward(value, magnitude.to(dtype), tables, noise.nu.to(dtype), call.documents, call.q.shape[2])
    return m_bar
