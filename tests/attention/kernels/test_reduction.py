"""With the exponential kernel and no decay, torch's own attention gives exactly the robust estimate."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same, make_case, run

from polarlm.attention import kernels
from polarlm.errors import UserError


@pytest.mark.parametrize("residual_form", ["full", "dot"])
@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 63), (1, 40)])
def test_outputs_evidence_and_gradients(monkeypatch, magnitude, queries, keys, residual_form):
    case = make_case(queries=queries, keys=keys, magnitude=magnitude)
    case = _without_decay(case)
    called = _watched(monkeypatch)
    radial_mode = "own" if magnitude else "off"
    assert_same(case, "auto", 1e-9, kernel="exponential", radial_mode=radial_mode, residual_form=residual_form)
    assert called


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_dot_form_of_raw_queries_and_keys_is_ordinary_attention(backend, groups):  # K11
    size, tau = 8, 0.7
    q, k, v = (torch.randn(2, heads, 13, size, dtype=torch.float64).requires_grad_() for heads in (4, groups, groups))
    precision = tau * (size / 2) / (2 * size**0.5)  # tau = 2 kappa_tilde sqrt(Dh)/d_h: a logit is q.k/sqrt(Dh)
    share = torch.full((4,), 1 / (3 * precision), dtype=torch.float64)
    noise = kernels.DirectionalNoise(0 * share, share, share, share, 0 * share, tau=torch.full_like(share, tau))

    def attend(form):
        call = kernels.RobustCall(q, k, v, noise, "exponential", residual_form=form)
        return kernels.robust_attention(call, backend).v_bar

    def gradients(out):
        return torch.autograd.grad((out * torch.cos(torch.arange(out.numel())).view_as(out)).sum(), (q, k, v))

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend("dot"), expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(gradients(attend("dot")), gradients(expected), atol=1e-12, rtol=1e-10)
    assert (attend("full") - expected).abs().max() > 0.1  # the norms matter when they differ


@pytest.mark.parametrize("change", ["documents", "decay", "continuation"])
def test_dot_form_where_it_cannot_be_reduced_follows_the_reference(change):
    case = make_case(queries=5, keys=13) if change == "continuation" else make_case()
    case = case if change == "decay" else _without_decay(case)
    documents = torch.arange(13).expand(2, 13) // 5 if change == "documents" else None
    assert_same(case, "auto", 1e-12, kernel="exponential", documents=documents, residual_form="dot")


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("auto", {"kernel": "student", "residual_form": "dot"}, ["block.residual_form=dot", "block.kernel=student"]),
        (
            "auto",
            {"kernel": "exponential", "residual_form": "angular"},
            ["block.residual_form", "angular", "full, dot"],
        ),
        ("streaming", {"residual_form": "dot"}, ["block.backend=streaming", "block.residual_form=full"]),
        ("triton", {"residual_form": "dot"}, ["block.backend=triton", "block.residual_form=full"]),
    ],
)
def test_dot_form_says_what_it_cannot_do(backend, options, words):
    case = make_case()
    with pytest.raises(UserError) as error:
        run(case, backend, **{"kernel": "exponential"} | options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("change", ["decay", "kernel", "documents"])
def test_it_stays_away_where_the_logits_are_no_dot_product(monkeypatch, change):
    case = make_case()
    called = _watched(monkeypatch)
    if change != "decay":
        case = _without_decay(case)
    documents = torch.zeros(2, 13, dtype=torch.long) if change == "documents" else None
    kernel = "student" if change == "kernel" else "exponential"
    assert_same(case, "auto", 1e-9, kernel=kernel, documents=documents)
    assert not called


def _without_decay(case):
    case.noise = type(case.noise)(**(vars(case.noise) | {"mu": torch.zeros_like(case.noise.mu)}))
    case.leaves = lambda leaves=case.leaves: {n: x for n, x in leaves().items() if n != "noise.mu"}
    return case


def _watched(monkeypatch) -> list:
    """A list that grows with every call of the reduction."""
    calls, backend = [], kernels.BACKENDS["reduction"]

    def run(call):
        calls.append(call)
        return backend.run(call)

    monkeypatch.setitem(kernels.BACKENDS, "reduction", backend._replace(run=run))
    return calls
