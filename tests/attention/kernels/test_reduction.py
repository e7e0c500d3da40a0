"""With the exponential kernel and no decay, torch's own attention gives exactly the robust estimate."""

import pytest
import torch
from cases import assert_same, make_case

from polarlm.attention import kernels


@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 63), (1, 40)])
def test_outputs_evidence_and_gradients(monkeypatch, magnitude, queries, keys):
    case = make_case(queries=queries, keys=keys, magnitude=magnitude)
    case = _without_decay(case)
    called = []
    monkeypatch.setattr(kernels, "reduced_attention", _watched(kernels.reduced_attention, called))
    options = dict(kernel="exponential", radial_mode="own") if magnitude else dict(kernel="exponential")
    assert_same(case, "auto", 1e-9, **options)
    assert called


@pytest.mark.parametrize("change", ["decay", "kernel", "documents"])
def test_it_stays_away_where_the_logits_are_no_dot_product(monkeypatch, change):
    case = make_case()
    called = []
    monkeypatch.setattr(kernels, "reduced_attention", _watched(kernels.reduced_attention, called))
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


def _watched(function, calls):
    def call(*args):
        calls.append(1)
        return function(*args)

    return call
