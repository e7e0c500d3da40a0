"""The Triton kernels in the interpreter against the reference; test_triton.py runs this file in its own process.

Few heads and short sequences: the interpreter needs about 20 ms per tile. Every branch of the kernels runs for every
commit; further lengths and combinations of the same branches run at night (POLARLM_NIGHTLY=1).
"""

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from polarlm.attention.robust import reference, robust_attention
from polarlm.attention.robust.call import NOISE_ROWS
from polarlm.errors import UserError
from polarlm.fast import triton_backend, triton_kernels, triton_radial, triton_tiles
from polarlm.geometry import precision
from tests.fast.cases import assert_same, make_case, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about pairs that are masked
SMALL = dict(batch=1, heads=2, groups=1, dtype=torch.float32)
nightly = pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="branches that others take: POLARLM_NIGHTLY=1")


def at_night(*cases):
    """Cases for the nightly set."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=nightly) for case in cases]


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


@pytest.mark.parametrize(
    ("kernel", "learned", "forgets"),
    [("student", False, 50.0), ("gaussian", True, 0.5)]
    + at_night(("student", True, 50.0), ("gaussian", True, 50.0), ("student", True, 0.5), ("student", False, 0.5)),
)
def test_a_past_that_fades(kernel, learned, forgets):
    case = make_case(queries=19, keys=40, forgets=forgets, **SMALL)
    case.noise.nu.requires_grad_(learned).data.fill_(3.0)
    documents = (torch.arange(40) // 30).expand(1, 40)
    assert_same(case, "triton", 2e-4, kernel=kernel, documents=documents)


@pytest.mark.parametrize(
    ("factor", "packed", "constant"),
    [(1.0, True, True), (30.0, False, False)]
    + at_night((1.0, False, False), (1.0, True, False), (1.0, False, True), (30.0, True, False))
    + at_night((30.0, False, True), (30.0, True, True)),
)
def test_the_plain_dot_product_with_forget_gates(constant, factor, packed):
    """As FoX has it, also where logits of a thousand make a row's largest weight necessary."""
    case = make_case(queries=90, forgets=0.5, magnitude=False, **SMALL)
    with torch.no_grad():
        case.q *= factor
        if constant:
            case.noise.mu.zero_(), case.noise.eta_k2.zero_()
    documents = (torch.arange(90) // 40).expand(1, 90) if packed else None
    options = dict(kernel="exponential", residual_form="dot", documents=documents, constant=constant)
    if constant:
        for parameter in (case.noise.mu, case.noise.eta_k2):
            parameter.requires_grad_(False)
    assert_same(case, "triton", 1e-3 if factor > 1 else 2e-4, **options)


@pytest.mark.parametrize("length", [1, 97, *at_night(63)])
def test_odd_lengths(length):
    case = make_case(queries=length, size=16, **SMALL | dict(heads=1))
    assert_same(case, "triton", 2e-4, kernel="student", radial_mode="own")


def radial(case, estimate, **options):
    """m̄ and the gradients of every leaf that it has."""
    m_bar = estimate(case.call(kernel="student", radial_mode="own", **options))
    leaves = {name: leaf for name, leaf in case.leaves().items() if not name.startswith("noise.")}
    upstream = torch.cos(torch.arange(m_bar.numel(), dtype=m_bar.dtype)).view_as(m_bar)
    results = torch.autograd.grad(m_bar, list(leaves.values()), upstream, allow_unused=True)
    named = {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), results)}
    return named | {"m_bar": m_bar.detach()}


def assert_same_radial(case, tolerance, against=None, **options):
    actual = radial(case, lambda call: triton_backend.triton_radial_estimate(call, case.q.dtype), **options)
    for name, truth in radial(against or case, reference.radial_estimate, **options).items():
        error, scale = (actual[name].double() - truth.double()).abs().max(), truth.double().abs().max()
        assert error <= tolerance * max(scale, 1e-3), f"{name}: error {error:.3g} at scale {scale:.3g}"
    return actual


@pytest.mark.parametrize(
    ("queries", "keys", "packed", "correlation"),
    [(40, 75, False, "qk"), (63, 63, True, "vv"), (1, 1, False, "one")]
    + at_night((40, 75, False, "vv"), (40, 75, False, "one"), (63, 63, True, "qk"), (63, 63, True, "one"))
    + at_night((1, 1, False, "qk"), (1, 1, False, "vv")),
)
def test_the_radial_channel(monkeypatch, correlation, queries, keys, packed):
    monkeypatch.setattr(triton_backend, "RADIAL_CHUNK", 48)  # the last one not full
    case = make_case(batch=2, heads=4, groups=2, queries=queries, keys=keys, size=40, dtype=torch.float32)
    documents = (torch.arange(keys) // 9).expand(2, keys) if packed else None
    first, again = (assert_same_radial(case, 3e-4, radial_correlation=correlation, documents=documents) for _ in "12")
    assert all(torch.equal(first[name], again[name]) for name in first), "two runs of one call differ"


def test_the_radial_channel_in_bf16():
    case = make_case(**SMALL | dict(queries=63, dtype=torch.bfloat16))
    assert_same_radial(case, 2e-2, radial_correlation="qk")


def test_both_channels_at_once():
    case = make_case(queries=19, **SMALL)
    assert_same(case, "triton", 2e-4, kernel="student", radial_mode="own", radial_correlation="qk")


# Sums inside, and beyond either border of, what is summed without finding a row's largest weight first.
@pytest.mark.parametrize(
    ("nu", "factor", "noise", "inside"),
    [(4.0, 1.0, 1.0, True), (30.0, 1e2, 1.0, False), (4.0, 1.0, 1e-14, False), (4.0, 1e8, 1.0, False)],
)
def test_radial_sums_of_any_size(nu, factor, noise, inside):
    torch.manual_seed(0)
    case = make_case(**SMALL | dict(queries=19, dtype=torch.float64))
    with torch.no_grad():
        case.k[:] = -case.q[:, :1]  # the own cosine is the worst
        case.magnitude *= factor
        case.radial.nu.fill_(nu)
        for name in ("eta_k2", "sigma02"):
            getattr(case.radial, name).mul_(noise)
    sums = radial_evidence(case)
    assert (sums.min() > -144 and sums.max() < 46) == inside
    assert_same_radial(case.each(Tensor.float), 1e-3, against=case, radial_correlation="qk")


def radial_evidence(case):
    """log2 of the sum of a query's radial weights, by the paper's formulas."""
    noise, m, call = case.radial, case.magnitude, case.call(kernel="student", radial_correlation="qk")
    lag = (torch.arange(19)[:, None] - torch.arange(19)).clamp_min(0).double()
    shared = dict(mu=noise.mu, eta_k2=noise.eta_k2, sigma02=noise.sigma02)
    off = call.cosine() * torch.exp(-noise.mu * lag) * m[:, None] - m[:, :, None]
    y = precision.log_rho_tilde(lag, eta_q2=noise.eta_q2, **shared).exp() * off.square() / noise.nu
    logits = precision.log_rho(lag, **shared) - (noise.nu + 1) * torch.log1p(y)
    return logits.masked_fill(~torch.ones(19, 19).tril().bool(), -torch.inf).logsumexp(-1) / np.log(2)


@nightly
def test_a_thousand_tokens(monkeypatch):
    # Larger blocks than a GPU would hold: the interpreter's time goes by tiles, not by their size.
    large = {name: dict.fromkeys(sizes, (128, 128, 4, 1)) for name, sizes in triton_backend.LAUNCH.items()}
    monkeypatch.setattr(triton_backend, "LAUNCH", large)
    case = make_case(queries=1000, size=16, **SMALL | dict(heads=1))
    assert_same(case, "triton", 2e-4, kernel="student", radial_mode="own")


def test_several_groups_and_rows_of_a_batch():
    case = make_case(batch=2, heads=4, groups=2, queries=5, dtype=torch.float32)
    assert_same(case, "triton", 2e-4, kernel="student")


@pytest.mark.parametrize("packed", [True, *at_night(False)])
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


@pytest.mark.parametrize("nu", [3.0, 3.5, *at_night(1.0, 7.0)])
def test_a_frozen_power_by_squaring_and_heads_that_differ(nu):
    case = make_case(queries=19, **SMALL)
    case.noise.nu.requires_grad_(False)[0] = nu  # the other head keeps a ν of its own
    assert_same(case, "triton", 2e-4, kernel="student", decay_values=True)


# log2 of the smallest and largest sum of a row: well inside, on both sides of the borders of what is summed without a
# maximum (−144 and 46), and beyond what fp32 could hold at all (−149).
@pytest.mark.parametrize(
    ("kernel", "shape", "learned", "factor", "crowd", "least", "most"),
    [
        ("student", 7.0, False, 1e2, 1e14, -83, 29),  # the largest κ alone is beyond 2^64
        ("student", 14.0, True, 1e3, 1.0, -149, -92),
        ("exponential", 1.0, True, 8.0, 1.0, -2295, -16),
        ("gaussian", 1.0, True, 1.0, 1e17, 3, 115),
        *at_night(
            ("student", 7.0, False, 1e2, 1.0, -83, -53),
            ("student", 12.0, True, 1e3, 1.0, -129, -80),
            ("student", 60.0, False, 1e3, 1.0, -549, -317),
            ("exponential", 1.0, True, 2.0, 1.0, -139, 1),
            ("gaussian", 1.0, True, 1.0, 1e8, 3, 56),
        ),
    ],
)
def test_sums_of_any_size(kernel, shape, learned, factor, crowd, least, most):
    """Against float64: in fp32 the reference itself is right only as far as its logits are."""
    torch.manual_seed(0)
    case = make_case(**SMALL | dict(queries=19, dtype=torch.float64))
    with torch.no_grad():
        case.noise.nu.fill_(shape), case.noise.tau.fill_(shape), case.noise.mu.fill_(0.01)
        case.noise.nu.requires_grad_(learned)
        case.magnitude *= factor
        case.magnitude[:, -4] *= crowd
        case.k[:] = -case.q[:, :1]  # the own key is the farthest
    sums = run(case, "reference", kernel=kernel)[0]["log_evidence"] / np.log(2)
    assert (sums.min().item(), sums.max().item()) == pytest.approx((least, most), abs=1)
    assert_same(case.each(Tensor.float), "triton", 1e-3, against=case, kernel=kernel)


def test_a_row_does_not_feel_what_comes_after_it():
    case = make_case(queries=40, **SMALL)
    before, _ = run(case, "triton", kernel="student")
    with torch.no_grad():
        case.magnitude[:, 30:] *= 7
        case.k[:, :, 30:] *= -1
    after, _ = run(case, "triton", kernel="student")
    for name in before:
        assert torch.equal(before[name][:, :, :30], after[name][:, :, :30]), name


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


@triton.jit
def off(result, x, relative, absolute):
    """The result up or down by an error, as the last bit of x falls."""
    up = (x.to(tl.int32, bitcast=True) & 1).to(tl.float32) * 2 - 1
    return result * (1 + relative * up) + absolute * up


# 1/x, 2^x and log2 x with the largest errors that a GPU's instructions for them may have (PTX ISA).
@triton.jit
def rough_reciprocal(x, S: tl.constexpr):
    return off(1 / x, x, 2**-23, 0.0)


@triton.jit
def rough_power2(x, S: tl.constexpr):
    return off(tl.exp2(x), x, 2**-22, 0.0)


@triton.jit
def rough_logarithm2(x, S: tl.constexpr):
    return off(tl.log2(x), x, 2**-22, 2**-22)


ROUGH = {"reciprocal": rough_reciprocal, "power2": rough_power2, "logarithm2": rough_logarithm2}


@pytest.mark.parametrize("learned", [False, *at_night(True)])
def test_approximate_instructions_cost_no_accuracy(monkeypatch, learned):
    case = make_case(queries=40, forgets=0.02, size=64, **SMALL)
    if not learned:
        case.noise.nu.requires_grad_(False).data.fill_(3.0)
    exact = error_against_float64(case)
    for module in (triton_tiles, triton_kernels):
        for name in ROUGH.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, ROUGH[name])
    rough = error_against_float64(case)
    assert max(exact.values()) < 2e-6 and max(rough.values()) < 6e-6, (exact, rough)
    assert exact != rough


def error_against_float64(case):
    """Largest error of every output and gradient, over its largest number."""
    exact = case.each(Tensor.double)
    truth, results = (run(x, backend, kernel="student") for x, backend in ((exact, "reference"), (case, "triton")))
    pairs = [(name, t, r[name]) for t, r in zip(truth, results) for name, t in t.items()]
    return {name: float((a - b).detach().abs().max() / a.detach().abs().max()) for name, a, b in pairs if a.any()}


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
    arguments = (case.q, case.k, case.v, case.magnitude, None, parameters, None)
    arguments += ("student", False, False, False, False, True)
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


def _addresses(x):
    """Of every element of a tensor."""
    at = np.array(x.data_ptr())
    for length, stride in zip(x.shape, x.stride()):
        at = at[..., None] + np.arange(length) * stride * x.element_size()
    return at.ravel()


def _all_among(addresses, allowed):
    return bool((allowed[np.searchsorted(allowed, addresses).clip(max=len(allowed) - 1)] == addresses).all())


@pytest.fixture
def guard(monkeypatch):
    """Kernels may read elements of their arguments only, and write every element of their results exactly once.

    Checked lane by lane at the interpreter's loads and stores; what lies between the rows of a view is no element.
    """
    builder, launch = interpreter.InterpreterBuilder, triton_backend._Launch.launch
    load, store = builder.create_masked_load, builder.create_masked_store
    readable, writable, written, launched = [], [], [], []

    def watched_load(self, pointers, mask, *others):
        touched = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        assert _all_among(touched, readable[-1]), "reads what it was not given"
        return load(self, pointers, mask, *others)

    def watched_store(self, pointers, value, mask, *others):
        written.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        assert _all_among(written[-1], writable[-1]), "writes beyond its results"
        return store(self, pointers, value, mask, *others)

    def watched_launch(self, name, given, results, **learns):
        tensors = [x for x in (*self.inputs, *given) if isinstance(x, torch.Tensor)]
        readable.append(np.sort(np.concatenate([_addresses(x) for x in tensors])))
        writable.append(np.sort(np.concatenate([_addresses(x) for x in results if x is not None])))
        written.clear()
        launch(self, name, given, results, **learns)
        assert np.array_equal(np.sort(np.concatenate(written)), writable[-1]), "writes too little or twice"
        launched.append(name)

    monkeypatch.setattr(builder, "create_masked_load", watched_load)
    monkeypatch.setattr(builder, "create_masked_store", watched_store)
    monkeypatch.setattr(triton_backend._Launch, "launch", watched_launch)
    return launched


def _within_nan(x):
    """The same numbers as a view with NaN on all sides of every row."""
    around = torch.full((*x.shape[:-2], x.shape[-2] + 7, x.shape[-1] + 24), torch.nan)
    view = around[..., 3:-4, 16:-8]
    view.copy_(x.detach())
    return view.requires_grad_()


def _guarded_case(kernel):
    case = make_case(batch=2, heads=2, groups=1, queries=21, keys=37, size=12, dtype=torch.float32, forgets=0.3)
    case.q, case.k, case.v = (_within_nan(x) for x in (case.q, case.k, case.v))
    documents = (torch.arange(37) // 9).expand(2, 37)
    return case, dict(kernel=kernel, documents=documents, decay_keys=True, decay_values=True, radial_mode="own")


@pytest.mark.parametrize("kernel", ["student", *at_night("exponential")])
def test_only_what_was_given_is_read_and_every_result_is_written_once(guard, kernel):
    case, options = _guarded_case(kernel)
    if kernel == "exponential":
        case.magnitude.data *= 6  # rows whose largest weight is found first
        assert run(case, "reference", **options)[0]["log_evidence"].min() < -150
    assert_same(case, "triton", 2e-3, **options)
    assert sorted(guard) == ["forward", "key", "query", "radial", "radial_pairs"]


@pytest.mark.parametrize(
    ("module", "helper"),
    [
        *((triton_kernels, helper) for helper in ("load_rows", "load_each", "store_rows")),
        *((triton_radial, helper) for helper in ("load_rows", "load_each")),
    ],
)
def test_the_guard_notices_a_missing_mask(guard, monkeypatch, module, helper):
    place = {"load_rows": 3, "load_each": 3, "store_rows": 2}[helper]  # of `valid` among the arguments
    intact = getattr(module, helper)

    def careless(*arguments):
        everything = arguments[place] | ~arguments[place]
        return intact(*arguments[:place], everything, *arguments[place + 1 :])

    monkeypatch.setattr(module, helper, careless)
    case, options = _guarded_case("student")
    with pytest.raises(Exception, match=r"reads what it was not given|writes beyond"):
        run(case, "triton", **options)
