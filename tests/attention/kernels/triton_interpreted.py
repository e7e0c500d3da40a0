"""The Triton kernels in the interpreter against the reference; test_triton.py runs this file in its own process.

Few heads and short sequences: the interpreter needs about 20 ms per tile.
"""

import pytest
import torch
from cases import assert_same, make_case, run

from polarlm.attention.kernels import robust_attention, triton_backend
from polarlm.attention.kernels.noise import NOISE_ROWS
from polarlm.errors import UserError

SMALL = dict(batch=1, heads=2, groups=1, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Uninitialised memory holds NaN, so that reading it cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def test_it_is_the_interpreter_that_runs():
    assert triton_backend.INTERPRETED


@pytest.mark.parametrize("kernel", ["student", "exponential", "gaussian"])
@pytest.mark.parametrize(
    ("magnitude", "decay_keys", "decay_values"), [(True, False, False), (True, True, True), (False, True, False)]
)
def test_every_switch(kernel, magnitude, decay_keys, decay_values):
    case = make_case(queries=19, magnitude=magnitude, process=decay_keys, **SMALL)
    assert_same(case, "triton", 2e-4, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values)


@pytest.mark.parametrize("length", [1, 63, 257])
def test_odd_lengths(length):
    case = make_case(queries=length, size=16, **SMALL | dict(heads=1))
    assert_same(case, "triton", 2e-4, kernel="student", radial_mode="own")


def test_a_thousand_tokens(monkeypatch):
    # Larger blocks than a GPU would hold: the interpreter's time goes by tiles, not by their size.
    large = {name: dict.fromkeys(sizes, (128, 128, 4, 1)) for name, sizes in triton_backend.LAUNCH.items()}
    monkeypatch.setattr(triton_backend, "LAUNCH", large)
    case = make_case(queries=1000, size=16, **SMALL | dict(heads=1))
    assert_same(case, "triton", 2e-4, kernel="student", radial_mode="own")


def test_several_groups_and_rows_of_a_batch():
    case = make_case(batch=2, heads=4, groups=2, queries=5, dtype=torch.float32)
    assert_same(case, "triton", 2e-4, kernel="student")


@pytest.mark.parametrize("packed", [False, True])
def test_cached_keys_and_documents(packed):
    case = make_case(queries=40, keys=75, **SMALL)
    documents = (torch.arange(75) // 9).expand(1, 75) if packed else None
    assert_same(case, "triton", 2e-4, kernel="student", documents=documents)


def test_bf16_inputs_are_scored_in_fp32():
    case = make_case(**SMALL | dict(queries=63, dtype=torch.bfloat16))
    assert_same(case, "triton", 2e-2, kernel="student")
    outputs, _ = run(case, "triton", kernel="student")
    assert outputs["v_bar"].dtype == torch.bfloat16
    assert outputs["log_evidence"].dtype == torch.float32


def test_head_sizes_that_are_no_power_of_two_and_views_that_are_not_contiguous():
    case = make_case(queries=19, size=24, **SMALL)
    case.q, case.k, case.v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (case.q, case.k, case.v)
    )
    assert_same(case, "triton", 2e-4, kernel="student")


def test_capped_precision_has_the_reference_gradient():
    case = make_case(queries=9, **SMALL)
    with torch.no_grad():
        case.magnitude[:, ::2] *= 1e3  # κ̃ runs into its cap
    assert_same(case, "triton", 2e-4, kernel="student")


def test_long_lags_and_switched_off_floors_stay_finite():
    case = make_case(queries=3, keys=120, **SMALL)
    with torch.no_grad():
        case.noise.mu.fill_(1.0)  # E² underflows after 50 tokens
        case.noise.m_inf2.zero_()
        case.noise.sigma02.zero_()
        case.magnitude[0, 110] = 0
    outputs, gradients = run(case, "triton", kernel="student")
    expected, _ = run(case, "reference", kernel="student")
    for x in (*outputs.values(), *gradients.values()):
        assert x.isfinite().all()
    torch.testing.assert_close(outputs["v_bar"], expected["v_bar"], rtol=1e-3, atol=1e-4)


def test_frozen_noise_changes_no_other_gradient():
    case = make_case(queries=19, **SMALL)
    _, learned = run(case, "triton", kernel="student")
    for parameter in vars(case.noise).values():
        if parameter is not None:
            parameter.requires_grad_(False)
    out = robust_attention(case.call(kernel="student"), "triton")
    generator = torch.Generator().manual_seed(7)
    total = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in (out.v_bar, out.log_evidence)
    )
    frozen = torch.autograd.grad(total, (case.q, case.k, case.v, case.magnitude))
    for name, gradient in zip(("q", "k", "v", "magnitude"), frozen):
        torch.testing.assert_close(gradient, learned[name], rtol=0, atol=0)


def test_the_operator_is_one_that_torch_compile_can_trace():
    case = make_case(queries=5, **SMALL)
    parameters = torch.rand(len(NOISE_ROWS), 2) + 0.1
    arguments = (case.q, case.k, case.v, case.magnitude, parameters, None, "student", False, False)
    torch.library.opcheck(
        triton_backend.triton_forward.traced, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("options", "reason"), [(dict(dropout=0.1), "dropout"), (dict(radial_mode="shared"), "radial=shared")]
)
def test_what_it_cannot_do_is_an_error_that_says_why(options, reason):
    case = make_case(queries=5, **SMALL)
    with pytest.raises(UserError, match=reason):
        run(case, "triton", kernel="student", **options)
