"""Streaming attention equals the reference in every output and gradient, whatever the shape and the switches."""

import dataclasses

import pytest
import torch
from cases import assert_same, make_case, run

from polarlm.attention.kernels import KERNELS, RobustCall, chunks, fusion, robust_attention
from polarlm.errors import UserError


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory holds NaN, so that reading it cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 5)
    monkeypatch.setattr(chunks, "CHUNK_SCORES", 300)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize(("decay_keys", "decay_values"), [(False, False), (True, True), (True, False)])
@pytest.mark.usefixtures("small_chunks", "poisoned_memory")
def test_every_switch_in_float64(kernel, magnitude, decay_keys, decay_values):
    case = make_case(magnitude=magnitude, process=decay_keys)
    assert_same(case, "streaming", 1e-9, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values)


@pytest.mark.parametrize("radial_mode", ["own", "shared"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("small_chunks", "poisoned_memory")
def test_radial_channel_streams(radial_mode, packed):
    case = make_case(queries=17)
    documents = (torch.arange(17) // 6).expand(2, 17) if packed else None
    assert_same(case, "streaming", 1e-9, kernel="student", radial_mode=radial_mode, documents=documents)


@pytest.mark.parametrize("length", [1, 63, 257, 1000])
@pytest.mark.parametrize("groups", [3, 1])
@pytest.mark.usefixtures("poisoned_memory")
def test_odd_lengths_in_fp32(length, groups):
    case = make_case(batch=1, heads=3, groups=groups, queries=length, size=16, dtype=torch.float32)
    assert_same(case, "streaming", 2e-4, kernel="student", radial_mode="own")


@pytest.mark.usefixtures("small_chunks", "poisoned_memory")
@pytest.mark.parametrize("radial_mode", ["own", "shared"])
def test_cached_keys_and_documents(radial_mode):
    case = make_case(queries=7, keys=23)
    documents = (torch.arange(23) // 9).expand(2, 23)
    assert_same(case, "streaming", 1e-9, kernel="student", radial_mode=radial_mode)
    assert_same(case, "streaming", 1e-9, kernel="exponential", radial_mode=radial_mode, documents=documents)


def test_bf16_inputs_are_scored_in_fp32():
    case = make_case(queries=63, dtype=torch.bfloat16)
    assert_same(case, "streaming", 1e-2, kernel="student", radial_mode="own")
    outputs, _ = run(case, "streaming", kernel="student")
    assert outputs["v_bar"].dtype == torch.bfloat16
    assert outputs["log_evidence"].dtype == torch.float32


def test_capped_precision_has_the_reference_gradient():
    case = make_case(queries=9)
    with torch.no_grad():
        case.magnitude[:, ::2] *= 1e3  # κ̃ runs into its cap
    assert_same(case, "streaming", 1e-8, kernel="student")


@pytest.mark.parametrize("nu", [1e-3, 1e8])
def test_extreme_nu_stays_exact_in_fp32(nu):
    case = make_case(queries=33, dtype=torch.float32)
    with torch.no_grad():
        case.noise.nu.fill_(nu)
    single, _ = run(case, "streaming", kernel="student")
    exact = robust_attention(_double(case.call(kernel="student")))
    assert (single["v_bar"] - exact.v_bar).abs().max() < 1e-4
    assert (single["log_evidence"] - exact.log_evidence).abs().max() < 1e-3 * exact.log_evidence.abs().max()


def _double(x):
    if dataclasses.is_dataclass(x):
        return type(x)(**{name: _double(value) for name, value in vars(x).items()})
    return x.double() if isinstance(x, torch.Tensor) else x


def test_long_lags_and_switched_off_floors_stay_finite():
    case = make_case(batch=1, heads=2, groups=1, queries=3, keys=5000, dtype=torch.float32)
    with torch.no_grad():
        case.noise.mu.fill_(1.0)  # E² underflows after 50 tokens
        case.noise.m_inf2.zero_()
        case.noise.sigma02.zero_()
        case.magnitude[0, 4990] = 0
    outputs, gradients = run(case, "streaming", kernel="student")
    for x in (*outputs.values(), *gradients.values()):
        assert x.isfinite().all()


@pytest.mark.usefixtures("small_chunks")
def test_dropout_is_the_same_in_both_passes_and_leaves_the_evidence():
    case = make_case(queries=17)
    plain, _ = run(case, "streaming", kernel="student")
    torch.manual_seed(3)
    dropped, gradients = run(case, "streaming", kernel="student", dropout=0.5)
    torch.testing.assert_close(plain["log_evidence"], dropped["log_evidence"])
    assert (plain["v_bar"] - dropped["v_bar"]).abs().max() > 1e-3
    # Directional derivative by finite differences: only right if the backward pass drops the same weights.
    step = torch.randn_like(case.q)
    values = []
    for sign in (1, -1):
        torch.manual_seed(3)
        moved = type(case)((case.q + sign * 1e-6 * step).detach().requires_grad_(), *list(vars(case).values())[1:])
        outputs, _ = run(moved, "streaming", kernel="student", dropout=0.5)
        generator = torch.Generator().manual_seed(7)
        values.append(
            sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs.values())
        )
    measured = (values[0] - values[1]) / 2e-6
    torch.testing.assert_close(measured, (gradients["q"] * step).sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(radial_mode="own"), dict(decay_keys=True, decay_values=True)])
@pytest.mark.usefixtures("poisoned_memory")
def test_fused_loops_equal_the_reference(monkeypatch, options):
    monkeypatch.setattr(fusion, "WORTH_COMPILING", 0)
    case = make_case(queries=257, size=16, dtype=torch.float32)
    assert_same(case, "streaming", 2e-4, kernel="student", **options)
    assert fusion._broken is None


def test_without_a_compiler_it_warns_once_and_goes_on(monkeypatch):
    monkeypatch.setattr(fusion, "WORTH_COMPILING", 0)
    monkeypatch.setattr(fusion, "_broken", None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: _no_compiler)
    fusion._bound.cache_clear()
    case = make_case()
    with pytest.warns(UserWarning, match="runs unfused"):
        assert_same(case, "streaming", 1e-9, kernel="student")
    fusion._bound.cache_clear()


def _no_compiler(*_):
    raise RuntimeError("no C++ compiler")


def test_an_explicit_backend_that_cannot_do_the_job_says_why():
    case = make_case()
    with pytest.raises(UserError, match="never holds the weights"):
        robust_attention(case.call(kernel="student", return_weights=True), "streaming")


@pytest.mark.usefixtures("small_chunks")
def test_memory_stays_linear_in_length():
    """The largest tensor made for N tokens is O(N), never O(N²)."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    sizes = []
    for length in (128, 256):
        largest = 0
        case = make_case(batch=1, queries=length, dtype=torch.float32)
        with Watch():
            run(case, "streaming", kernel="student", radial_mode="own")
        sizes.append(largest)
    assert sizes[1] < 2.5 * sizes[0]


@pytest.mark.slow
def test_an_outer_compile_sees_one_operator_and_no_graph_break():
    case = make_case(queries=33, dtype=torch.float32)

    def loss(q, k, v, m):
        out = robust_attention(RobustCall(q, k, v, case.noise, "student", m, radial=case.radial, radial_mode="own"))
        return out.v_bar.square().sum() + out.log_evidence.sum() + out.m_bar.sum()

    inputs = (case.q, case.k, case.v, case.magnitude)
    plain = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_small_calls_are_fused_only_on_request():
    def small() -> None: ...

    try:
        fusion.fuse_everything(True)
        fused = fusion.fused(small, 1)
        fusion.fuse_everything(False)
        assert fusion.fused(small, 1) is not fused
        assert fusion.fused(small, fusion.WORTH_COMPILING) is fused
    finally:
        fusion.fuse_everything(False)
