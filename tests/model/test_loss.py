"""The chunked loss equals F.cross_entropy in value and gradients, and never holds all logits."""

import pytest
import torch
import torch.nn.functional as F

from polarlm.model.loss import chunked_cross_entropy, chunked_tally


def _inputs(tokens: int = 37, d: int = 16, vocab: int = 61, dtype=torch.float64):
    hidden = torch.randn(1, tokens, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (1, tokens))
    targets[0, ::5] = -100
    return hidden, weight, targets


def _plain(hidden, weight, targets, reduction, cap=None):
    logits = hidden @ weight.t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_value_and_gradients_equal_cross_entropy(reduction, chunk, cap):
    hidden, weight, targets = _inputs()
    ours = chunked_cross_entropy(hidden, weight, targets, reduction, chunk, cap)
    plain = _plain(hidden, weight, targets, reduction, cap)
    torch.testing.assert_close(ours, plain)
    upstream = torch.randn_like(plain)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight), upstream), torch.autograd.grad(plain, (hidden, weight), upstream)
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_everything_ignored_gives_zero_loss_and_zero_gradient(reduction):
    hidden, weight, targets = _inputs()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), reduction, 8)
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_frozen_weight_gets_no_gradient():
    hidden, weight, targets = _inputs()
    chunked_cross_entropy(hidden, weight.detach(), targets, chunk=8).backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_stay_fp32_under_autocast(reduction):
    hidden, weight, targets = _inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, targets, reduction, 8)
    assert loss.dtype == torch.float32
    exact = _plain(hidden, weight, targets, reduction)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.05)
    upstream = torch.ones_like(loss)
    for a, b in zip(
        torch.autograd.grad(loss, (hidden, weight), upstream), torch.autograd.grad(exact, (hidden, weight), upstream)
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_tensor_of_all_logits_is_ever_made():
    tokens, vocab, chunk = 256, 512, 16
    hidden, weight, targets = _inputs(tokens, 4, vocab, torch.float32)
    with Watch() as watch:
        chunked_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
        chunked_cross_entropy(hidden, weight, targets, "none", chunk).sum().backward()
    assert watch.largest <= chunk * vocab


def test_where_few_targets_count_only_they_get_logits():
    tokens, vocab, d = 64, 512, 4
    hidden, weight, targets = _inputs(tokens, d, vocab)
    targets[0, torch.arange(tokens) % 16 != 3] = -100  # four questions, as in a recall task
    with Watch() as watch:
        ours = chunked_cross_entropy(hidden, weight, targets)
        gradients = torch.autograd.grad(ours, (hidden, weight))
        total, hits = chunked_tally(hidden, weight, targets)
    assert watch.largest <= max(4 * vocab, vocab * d)
    plain = _plain(hidden, weight, targets, "mean")
    counted = targets != -100
    torch.testing.assert_close((ours, *gradients), (plain, *torch.autograd.grad(plain, (hidden, weight))))
    torch.testing.assert_close(total, plain * counted.sum())
    assert hits == ((hidden @ weight.t()).argmax(-1) == targets).sum()


def test_hits_are_targets_that_beat_every_other_token_and_count():
    weight = torch.eye(4, dtype=torch.float64)
    hidden = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0], [0, 9.0, 0, 0], [5.0, 5.0, 0, 0]], dtype=torch.float64)
    targets = torch.tensor([0, -100, 2, 1])  # right, not counted, wrong, a tie
    total, hits = chunked_tally(hidden, weight, targets)
    assert hits == 1
    torch.testing.assert_close(total, chunked_cross_entropy(hidden, weight, targets, "sum"))
    capped = chunked_tally(hidden, weight, targets, cap=2.0)[0]
    torch.testing.assert_close(capped, _plain(hidden, weight, targets, "sum", 2.0))


def _compiled(hidden, weight, targets, chunk, dtype=None):
    """(loss, what the compiler was given: the joint graphs' forward and backward)."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    loss = torch.compile(chunked_cross_entropy, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        value = loss(hidden, weight, targets, "sum", chunk)
    value.backward()
    return value, graphs


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_loss_keeps_one_gradient_of_the_weight_however_many_chunks_there_are(dtype):
    """Unrolled, every chunk's product of the weight's size stayed alive until they were added up."""
    counts = []
    for chunk in (8, 37):
        hidden, weight, targets = _inputs(dtype=torch.float32)
        value, graphs = _compiled(hidden, weight, targets, chunk, dtype)
        shapes = [node.meta["val"].shape for graph in graphs for node in graph.graph.nodes if "val" in node.meta
                  and isinstance(node.meta["val"], torch.Tensor)]  # fmt: skip
        counts.append(sum(shape == weight.shape for shape in shapes))
        plain = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            eager = chunked_cross_entropy(*plain, targets, "sum", chunk)
        eager.backward()
        assert torch.equal(value, eager)
        assert torch.equal(hidden.grad, plain[0].grad) and torch.equal(weight.grad, plain[1].grad)
    assert counts[0] == counts[1]
