"""Cross-entropy of a linear output layer without ever holding all logits: memory O(chunk·V) instead of O(B·T·V)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.ignored import IGNORED

# Logits of one chunk: on a CPU small enough to stay near the caches; on a GPU (1.2 GB with their gradient) so large
# that adding a chunk to the weight's gradient, which reads and writes all of it, takes little beside the products.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**26}
SMALLEST_CHUNK = 512
REDUCTIONS = ("mean", "sum", "none")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    chunk: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Cross-entropy of the logits hidden (…,d) @ weight (V,d)ᵀ against targets (…); targets of −100 do not count.

    `mean` divides by the number of targets that count; `none` has the shape of `targets` with 0 where nothing counts.
    The soft-max statistics are fp32 whatever the products are formed in. `chunk` is in tokens; `cap` bounds
    the logits (`cap_logits`).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")
    chunk = chunk or _chunk_tokens(weight)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if reduction == "none":
        return _PerToken.apply(rows, weight, flat, chunk, cap).view(targets.shape)
    if torch.compiler.is_compiling():
        total = compiled_total(rows, weight, flat, chunk, cap)
    else:
        total = _Total.apply(rows, weight, flat, chunk, cap)
    if reduction == "sum":
        return total
    return total / (flat != IGNORED).sum().clamp_min(1)


@torch.no_grad()
def chunked_tally(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """(summed loss, hits) of one pass: the bits of reduction="sum", and how often the target beat every other token."""
    chunk = _chunk_tokens(weight)
    rows, flat, dtype = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), _product_dtype(hidden)
    if (counted := _few_that_count(flat)) is not None:
        rows, flat = rows[counted], flat[counted]
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(dtype)
        for x, y in zip(rows.split(chunk), flat.split(chunk)):
            logits = _logits(x.to(dtype), w, cap)
            total += _losses(logits, y)[0].sum()
            target = y.clamp_min(0)[:, None]
            picked = logits.gather(1, target)[:, 0]
            others = logits.scatter_(1, target, -torch.inf).amax(-1)
            hits += ((picked > others) & (y != IGNORED)).sum()
    return total, hits


def log_probability_chunks(hidden: Tensor, weight: Tensor, cap: float | None = None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, log-probabilities (n, V)) of the predictions from hidden (N, d), a chunk at a time, in fp32 or better."""
    chunk, dtype = _chunk_tokens(weight), _product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(dtype)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            yield rows, _logits(hidden[rows].to(dtype), w, cap).log_softmax(-1)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap): the same near zero, never beyond ±cap; unchanged without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _few_that_count(targets: Tensor) -> Tensor | None:
    """Where the targets that count are, if most do not (recall tasks ask 4 of 64): the others need no logits.

    Returns None on a GPU, which would have to wait for the count, and in a plan, whose tensors hold no numbers.
    """
    if targets.device.type != "cpu" or type(targets) is not Tensor:
        return None
    counted = (targets != IGNORED).nonzero()[:, 0]
    return counted if 0 < 2 * len(counted) < len(targets) else None


def _chunk_tokens(weight: Tensor) -> int:
    return max(SMALLEST_CHUNK, CHUNK_LOGITS.get(weight.device.type, CHUNK_LOGITS["cpu"]) // weight.shape[0])


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _logits(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    statistics = torch.promote_types(hidden.dtype, torch.float32)
    return cap_logits((hidden @ weight.t()).to(statistics), cap)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per target, 0 where it is ignored, and the log-probabilities."""
    log_probabilities = logits.log_softmax(-1)
    return F.nll_loss(log_probabilities, targets, reduction="none", ignore_index=IGNORED), log_probabilities


def _logit_gradient(
    logits: Tensor, log_probabilities: Tensor, targets: Tensor, scale: Tensor | None, cap: float | None
) -> Tensor:
    """∂(Σ scale·loss)/∂logits = scale·(soft-max − one-hot), zero where the target is ignored; over the probabilities.

    With a cap, with respect to the logits before it: tanh' = 1 − tanh².
    """
    gradient = log_probabilities.exp_()
    counted = (targets != IGNORED).to(gradient.dtype)
    gradient.scatter_add_(1, targets.clamp_min(0)[:, None], -counted[:, None])
    gradient.mul_((counted if scale is None else counted * scale)[:, None])
    return gradient if cap is None else gradient.mul_(1 - (logits / cap).square())


class _Total(torch.autograd.Function):
    """Summed loss; the gradients are formed while a chunk's logits are at hand, so nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
        needed = ctx.needs_input_grad[:2]
        total, *gradients = total_and_gradients(hidden, weight, targets, chunk, cap, _product_dtype(hidden), *needed)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return *scaled_gradients(ctx, gradient), None, None, None


def total_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    cap: float | None,
    dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(summed loss, its gradients with respect to hidden and weight where they are needed); products in `dtype`."""
    if (counted := _few_that_count(targets)) is not None:
        total, d_counted, d_weight = total_and_gradients(
            hidden[counted], weight, targets[counted], chunk, cap, dtype, need_hidden, need_weight
        )
        return (
            total,
            None if d_counted is None else torch.zeros_like(hidden).index_copy_(0, counted, d_counted),
            d_weight,
        )
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_weight = None
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(dtype)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            x = hidden[rows].to(dtype)
            logits = _logits(x, w, cap)
            losses, log_probabilities = _losses(logits, targets[rows])
            total += losses.sum()
            if not (need_hidden or need_weight):
                continue
            d_logits = _logit_gradient(logits, log_probabilities, targets[rows], None, cap).to(dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_logits @ w
            if need_weight and d_weight is None:
                d_weight = (d_logits.t() @ x).to(weight.dtype)
            elif d_weight is not None:
                _add_product(d_weight, d_logits, x)
    return total, d_hidden, d_weight


def scaled_gradients(ctx, gradient: Tensor) -> list[Tensor | None]:
    """The gradients that the forward pass saved, times the one that arrives; None for what had none."""
    return [None if g is None or not g.numel() else g * gradient.to(g.dtype) for g in ctx.saved_tensors]


def compiled_total(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
    """The same under torch.compile: one operator, into which Inductor does not look.

    Traced, the chunks would be unrolled, and Inductor keeps a gradient of the weight's size for each of them.
    """
    needed = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight))
    return opaque_total(hidden, weight, targets, chunk, cap, _product_dtype(hidden), *needed)[0]


@torch.library.custom_op("polarlm::linear_cross_entropy", mutates_args=())
def opaque_total(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    cap: float | None,
    dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`total_and_gradients` with empty tensors for gradients that are not needed."""
    total, *gradients = total_and_gradients(hidden, weight, targets, chunk, cap, dtype, need_hidden, need_weight)
    d_hidden, d_weight = (hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return total, d_hidden, d_weight


@opaque_total.register_fake
def _(hidden, weight, targets, chunk, cap, dtype, need_hidden, need_weight):
    total = hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    d_hidden = torch.empty_like(hidden) if need_hidden else hidden.new_empty(0)
    return total, d_hidden, torch.empty_like(weight) if need_weight else hidden.new_empty(0)


def _save_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])


opaque_total.register_autograd(
    lambda ctx, gradient, *_: (*scaled_gradients(ctx, gradient), *[None] * 6), setup_context=_save_gradients
)


class _PerToken(torch.autograd.Function):
    """One loss per token; the backward pass, where the tokens' own gradients arrive, forms the logits again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, cap: float | None) -> Tensor:
        ctx.chunk, ctx.cap, ctx.dtype = chunk, cap, _product_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(ctx.dtype)
            pieces = zip(hidden.split(chunk), targets.split(chunk))
            losses = [_losses(_logits(x.to(ctx.dtype), w, cap), y)[0] for x, y in pieces]
        ctx.save_for_backward(hidden, weight, targets)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden, weight, targets = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight) if need_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(ctx.dtype)
            for start in range(0, hidden.shape[0], ctx.chunk):
                rows = slice(start, start + ctx.chunk)
                x = hidden[rows].to(ctx.dtype)
                logits = _logits(x, w, ctx.cap)
                log_probabilities = logits.log_softmax(-1)
                d_logits = _logit_gradient(logits, log_probabilities, targets[rows], gradient[rows], ctx.cap)
                d_logits = d_logits.to(ctx.dtype)
                if d_hidden is not None:
                    d_hidden[rows] = d_logits @ w
                if d_weight is not None:
                    _add_product(d_weight, d_logits, x)
        return d_hidden, d_weight, None, None, None


def _add_product(total: Tensor, d_logits: Tensor, x: Tensor) -> None:
    """total += d_logitsᵀ x, without a temporary of the weight's size where the dtypes allow it."""
    if total.dtype == x.dtype:
        total.addmm_(d_logits.t(), x)
    else:
        total += d_logits.t() @ x
