"""The native kernels equal the reference in every output and gradient, whatever shape, switches and range."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from polarlm import locations
from polarlm.attention.robust import (
    KERNELS,
    RADIAL_CORRELATIONS,
    DirectionalNoise,
    RobustCall,
    reference_attention,
    robust_attention,
)
from polarlm.errors import UserError
from polarlm.fast import backends as kernels
from polarlm.fast import build, native_backend, native_decode, passes, selfcheck
from tests.fast.cases import assert_same, make_case, run

SWITCHES = [(False, False), (True, True), (True, False), (False, True)]


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory holds NaN, so that reading it cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def two_threads(monkeypatch):
    """Also small calls are shared out."""
    monkeypatch.setattr(native_backend, "WORTH_SHARING", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def frozen(case, **values):
    """The case with these noises fixed: constants, not leaves."""
    fixed = {name: torch.full_like(case.noise.mu, value).detach() for name, value in values.items()}
    case.noise = replace(case.noise, **fixed)
    case.leaves = lambda leaves=case.leaves: {n: x for n, x in leaves().items() if x.requires_grad}
    return case


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize(("decay_keys", "decay_values"), SWITCHES)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_switch_in_float64(kernel, magnitude, decay_keys, decay_values):
    case = make_case(magnitude=magnitude, process=decay_keys)
    assert_same(case, "native", 1e-9, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values)


@pytest.mark.parametrize("radial_mode", ["own", "shared"])
@pytest.mark.parametrize("radial_correlation", RADIAL_CORRELATIONS)
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (7, 23), (70, 200)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_radial_channel_cache_and_documents(radial_mode, radial_correlation, queries, keys, packed):
    case = make_case(queries=queries, keys=keys)
    documents = (torch.arange(keys) // 9).expand(2, keys) if packed else None
    options = dict(radial_mode=radial_mode, radial_correlation=radial_correlation, documents=documents)
    assert_same(case, "native", 1e-9, kernel="student", **options)


@pytest.mark.parametrize("nu", [1.0, 3.0, 7.0, 4.0])
@pytest.mark.usefixtures("poisoned_memory")
def test_whole_powers_are_taken_by_squaring(nu):
    """ν + 1 = 2, 4, 8 need neither logarithm nor exponential; 5 does."""
    assert_same(frozen(make_case(queries=70), nu=nu), "native", 1e-9, kernel="student", decay_values=True)
    single = frozen(make_case(queries=70, dtype=torch.float32), nu=nu)
    assert_same(single, "native", 1e-4, kernel="student", radial_mode="own")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 257])
@pytest.mark.parametrize(("heads", "groups", "size"), [(3, 3, 16), (4, 2, 24), (3, 1, 8)])
@pytest.mark.usefixtures("poisoned_memory")
def test_odd_lengths_and_sizes_in_fp32(length, heads, groups, size):
    case = make_case(batch=1, heads=heads, groups=groups, queries=length, size=size, dtype=torch.float32)
    assert_same(case, "native", 2e-4, kernel="student", radial_mode="own")
    assert_same(case, "native", 2e-4, kernel="student", radial_mode="own", radial_correlation="qk")
    assert_same(case, "native", 2e-4, kernel="student", decay_keys=True, decay_values=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("radial_mode", ["off", "own", "shared"])
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (70, 200)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_past_that_fades(kernel, radial_mode, queries, keys, packed):
    case = make_case(queries=queries, keys=keys, forgets=0.5)
    documents = (torch.arange(keys) // 9).expand(2, keys) if packed else None
    assert_same(case, "native", 1e-9, kernel=kernel, radial_mode=radial_mode, documents=documents)


@pytest.mark.parametrize("nu", [3.0, 4.0])
@pytest.mark.parametrize("forgets", [0.1, 5.0, 200.0])
@pytest.mark.usefixtures("poisoned_memory", "two_threads")
def test_forgetting_by_squaring_in_fp32_and_beyond_what_fp32_holds(nu, forgets):
    """200 nats at a token: nothing of the past is left, and factors on either side of a pair would overflow."""
    case = frozen(make_case(queries=130, forgets=forgets, dtype=torch.float32), nu=nu)
    assert_same(case, "native", 3e-4, kernel="student", decay_values=True)
    case = frozen(make_case(queries=130, forgets=forgets), nu=nu)
    assert_same(case, "native", 1e-9, kernel="student")


def test_fading_soft_max_attention_with_dropped_weights_keeps_its_gradient():
    case = make_case(queries=33, forgets=0.5)
    call = case.call(kernel="exponential", residual_form="dot", dropout=0.3)
    inputs = (case.q, case.k, case.v, case.forgotten)

    def value(*given):
        torch.manual_seed(3)
        out = native_backend.native_attention(replace(call, **dict(zip(("q", "k", "v", "forgotten"), given))))
        return (out.v_bar.sin() * torch.arange(33)[:, None]).sum() + out.log_evidence.square().sum()

    gradients = torch.autograd.grad(value(*inputs), inputs)
    for at, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        steps = [
            value(*(x + sign * 1e-6 * direction if i == at else x for i, x in enumerate(inputs))) for sign in (1, -1)
        ]
        measured = (steps[0] - steps[1]) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), measured, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("radial_mode", ["off", "own"])
@pytest.mark.usefixtures("two_threads", "poisoned_memory")
def test_threads_share_units_and_query_blocks(batch, heads, radial_mode):
    case = make_case(batch=batch, heads=heads, groups=heads, queries=260)
    assert_same(case, "native", 1e-9, kernel="student", radial_mode=radial_mode)
    first, again = (run(case, "native", kernel="student", radial_mode=radial_mode) for _ in range(2))
    for a, b in zip(first, again):
        assert all(torch.equal(a[name], b[name]) for name in a), "two runs of one call differ"


@pytest.mark.parametrize("kernel", ["student", "exponential"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0, 20.0, 40.0])
def test_sums_out_of_range_are_formed_again_relative_to_their_maximum(kernel, scale):
    """Weights as small as e^−400, where a plain sum underflows in fp32: on both sides of the border and across it."""
    case = frozen(make_case(queries=70, dtype=torch.float32), nu=7.0)
    with torch.no_grad():
        case.q.mul_(scale), case.magnitude.mul_(scale)
    exact = make_case(queries=70)
    for name, leaf in case.leaves().items():
        owner = exact if "." not in name else getattr(exact, name.split(".")[0])
        getattr(owner, name.split(".")[-1]).data.copy_(leaf.data)
    frozen(exact, nu=7.0)
    truth, single, actual = (
        run(*given, kernel=kernel) for given in ((exact, "reference"), (case, "reference"), (case, "native"))
    )
    for exact_part, single_part, actual_part in zip(truth, single, actual):
        for name, value in exact_part.items():  # what rounding y to fp32 costs, it costs the reference in fp32 too
            allowed = 5 * (single_part[name] - value).abs().max() + 1e-4 * value.abs().max() + 1e-6
            assert (actual_part[name] - value).abs().max() <= allowed, name
    if scale >= 20:
        assert actual[0]["log_evidence"].min() < -60


def test_bf16_inputs_are_scored_in_fp32():
    case = make_case(queries=63, dtype=torch.bfloat16)
    assert_same(case, "native", 1e-2, kernel="student", radial_mode="own")
    outputs, _ = run(case, "native", kernel="student")
    assert outputs["v_bar"].dtype == torch.bfloat16
    assert outputs["log_evidence"].dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
def test_capped_precision_has_the_reference_values_and_gradient(kernel):
    case = make_case(queries=9)
    with torch.no_grad():
        case.magnitude[:, ::2] *= 1e3  # κ̃ runs into its cap
    assert_same(case, "native", 1e-8, kernel=kernel)


@pytest.mark.parametrize("nu", [1e-3, 1e8])
def test_extreme_nu_stays_exact_in_fp32(nu):
    case = make_case(queries=33, dtype=torch.float32)
    with torch.no_grad():
        case.noise.nu.fill_(nu)
    single, _ = run(case, "native", kernel="student")
    double = {name: None if x is None else x.double() for name, x in vars(case.noise).items()}
    call = case.call(kernel="student", noise=type(case.noise)(**double))
    exact = robust_attention(replace(call, **{n: getattr(case, n).double() for n in ("q", "k", "v", "magnitude")}))
    assert (single["v_bar"] - exact.v_bar).abs().max() < 1e-4
    assert (single["log_evidence"] - exact.log_evidence).abs().max() < 1e-3 * exact.log_evidence.abs().max()


@pytest.mark.parametrize("backend", ["native", "streaming"])
def test_long_lags_and_switched_off_floors_stay_finite(backend):
    case = make_case(batch=1, heads=2, groups=1, queries=3, keys=5000, dtype=torch.float32)
    with torch.no_grad():
        case.noise.mu.fill_(1.0)  # E² underflows after 50 tokens
        case.noise.m_inf2.zero_()
        case.noise.sigma02.zero_()
        case.magnitude[0, 4990] = 0
    outputs, gradients = run(case, backend, kernel="student")
    for x in (*outputs.values(), *gradients.values()):
        assert x.isfinite().all()


@pytest.mark.parametrize("backend", ["native", "streaming"])
def test_dropout_is_the_same_in_both_passes_and_leaves_the_evidence(backend):
    case = make_case(queries=150)
    plain, _ = run(case, backend, kernel="student")
    torch.manual_seed(3)
    dropped, gradients = run(case, backend, kernel="student", dropout=0.5)
    torch.testing.assert_close(plain["log_evidence"], dropped["log_evidence"])
    assert (plain["v_bar"] - dropped["v_bar"]).abs().max() > 1e-3
    # Directional derivative by finite differences: only right if the backward pass drops the same weights.
    step = torch.randn_like(case.q)
    values = []
    for sign in (1, -1):
        torch.manual_seed(3)
        moved = type(case)((case.q + sign * 1e-6 * step).detach().requires_grad_(), *list(vars(case).values())[1:])
        outputs, _ = run(moved, backend, kernel="student", dropout=0.5)
        generator = torch.Generator().manual_seed(7)
        values.append(
            sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs.values())
        )
    measured = (values[0] - values[1]) / 2e-6
    torch.testing.assert_close(measured, (gradients["q"] * step).sum(), rtol=1e-5, atol=1e-6)


def test_dropout_keeps_the_expectation_and_drops_the_asked_share():
    case = make_case(batch=1, heads=2, groups=2, queries=300)
    with torch.no_grad():
        case.v.fill_(1)
    sums = torch.stack([run(case, "native", kernel="gaussian", dropout=0.3)[0]["v_bar"] for _ in range(20)])
    assert abs(sums.mean() - 1) < 0.01
    assert sums[:, :, :, 0].unique().isclose(torch.tensor(1 / 0.7, dtype=torch.float64)).any()  # one weight, kept


@pytest.mark.parametrize("form", ["full", "dot"])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_with_all_the_weight_have_the_gradients_of_the_reference(form, packed):
    """Where an exponential kernel saturates gradients vanish; a rounding times its precision would not."""
    torch.manual_seed(0)
    heads, tokens, size, actual = 4, 24, 16, {}
    values = [torch.randn(2, heads, tokens, size) * scale for scale in (6.0, 6.0, 3.0)]
    upstream = torch.randn(2, heads, tokens, size)
    documents = (torch.arange(tokens) >= 11).long().expand(2, tokens) if packed else None
    for backend, dtype in (("reference", torch.float64), ("reference", torch.float32), ("native", torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in values)
        one = torch.ones(heads, dtype=dtype)
        tau, eta = (0.3 * one).requires_grad_(), (1e-3 * one).requires_grad_()
        noise = DirectionalNoise(0 * one, eta, 1e-3 * one, 1e-3 * one, 0 * one, tau=tau)
        call = RobustCall(q, k, v, noise, "exponential", residual_form=form, documents=documents)
        (robust_attention(call, backend).v_bar * upstream.to(dtype)).sum().backward()
        actual[backend, dtype] = torch.cat([x.grad.double().flatten() for x in (q, k, tau, eta)])
    truth, plain, native = actual.values()
    assert (native - truth).abs().max() <= 2 * (plain - truth).abs().max() + 1e-3


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("backend", ["native", "streaming", "reference"])
def test_dot_form_of_raw_queries_and_keys_is_ordinary_attention(backend, groups):  # K11
    size, tau = 8, 0.7
    q, k, v = (torch.randn(2, heads, 13, size, dtype=torch.float64).requires_grad_() for heads in (4, groups, groups))
    precision = tau * (size / 2) / (2 * size**0.5)  # tau = 2 kappa_tilde sqrt(Dh)/d_h: a logit is q.k/sqrt(Dh)
    share = torch.full((4,), 1 / (3 * precision), dtype=torch.float64)
    noise = DirectionalNoise(0 * share, share, share, share, 0 * share, tau=torch.full_like(share, tau))

    def attend(form):
        call = RobustCall(q, k, v, noise, "exponential", residual_form=form)
        return robust_attention(call, backend).v_bar

    def gradients(out):
        return torch.autograd.grad((out * torch.cos(torch.arange(out.numel())).view_as(out)).sum(), (q, k, v))

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend("dot"), expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(gradients(attend("dot")), gradients(expected), atol=1e-12, rtol=1e-10)
    assert (attend("full") - expected).abs().max() > 0.1  # the norms matter when they differ


@pytest.mark.parametrize("packed", [False, True])
def test_dot_form_with_decay_and_documents(packed):
    documents = torch.arange(13).expand(2, 13) // 5 if packed else None
    case = make_case()
    assert_same(case, "native", 1e-10, kernel="exponential", residual_form="dot", documents=documents, decay_keys=True)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("auto", {"kernel": "student", "residual_form": "dot"}, ["residual_form='dot'", "kernel='student'"]),
        ("auto", {"kernel": "exponential", "residual_form": "angular"}, ["residual_form", "full, dot"]),
        ("native", {"kernel": "student", "return_weights": True}, ["never holds the weights", "block.backend=auto"]),
        ("streaming", {"kernel": "student", "return_weights": True}, ["never holds the weights"]),
        ("triton", {"kernel": "exponential", "residual_form": "dot"}, ["it needs CUDA tensors", "on cpu"]),
    ],
)
def test_what_cannot_be_done_is_said(backend, options, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        run(make_case(), backend, **options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.slow
def test_an_outer_compile_sees_one_operator_and_no_graph_break():
    case = make_case(queries=33, dtype=torch.float32)

    def loss(q, k, v, m):
        call = replace(case.call(kernel="student", radial_mode="own"), q=q, k=k, v=v, magnitude=m)
        out = robust_attention(call)
        return out.v_bar.square().sum() + out.log_evidence.sum() + out.m_bar.sum()

    inputs = (case.q, case.k, case.v, case.magnitude)
    plain = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_compiler_it_warns_once_and_goes_on(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.library.cache_clear()
    kernels._warn_once.cache_clear()
    try:
        with pytest.warns(UserWarning, match="plain torch.*no C\\+\\+ compiler"):
            assert_same(make_case(), "auto", 1e-9, kernel="student", radial_mode="own")
        with pytest.raises(UserError, match="no C\\+\\+ compiler was found"):
            run(make_case(), "native", kernel="student")
    finally:
        build.library.cache_clear()


def test_a_machine_without_posix_locks_imports_attention_and_uses_plain_torch():
    code = """
import sys
sys.modules["fcntl"] = None  # as on Windows
import torch
from polarlm.attention import MixerShape, PolarAttention, TokenContext
from polarlm.geometry import rotary_tables
mixer = PolarAttention(MixerShape(d_model=16, n_head=2, n_kv_head=2, head_dim=8, layer=0, n_layer=1))
print(mixer(torch.randn(1, 5, 16), TokenContext(rotary_tables(torch.arange(5), 8))).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "torch.Size([1, 5, 16])" in done.stdout, done.stderr
    assert "plain torch" in done.stderr and "built on Linux and macOS only" in done.stderr


def test_a_second_process_finds_the_compiled_code_and_says_nothing(tmp_path, monkeypatch):
    cache, source = tmp_path / "cache", tmp_path / "source"
    source.mkdir()
    (source / "native.cpp").write_text('extern "C" int answer() { return sizeof(REAL); }')
    monkeypatch.setenv(locations.CACHE_VARIABLE, str(cache))
    monkeypatch.setattr(build, "SOURCES", source)
    build.library.cache_clear()
    try:
        assert build.library("double").answer() == 8
        (made,) = cache.glob("*/*.so")
        stamp = made.stat().st_mtime_ns
        command = f"""
from pathlib import Path
from polarlm.fast import build
build.SOURCES = Path({str(source)!r})
assert build.library("double").answer() == 8
"""
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")
        assert [path.stat().st_mtime_ns for path in cache.glob("*/*.so")] == [stamp]

        (source / "native.cpp").write_text('extern "C" int answer() { return -1; }')
        build.library.cache_clear()
        assert build.library("double").answer() == -1, "changed source, old code"
    finally:
        build.library.cache_clear()


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """(the cache, its private folder, builds and calls a tiny library)."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "native.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    monkeypatch.setenv(locations.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere" / "temporary"))
    (tmp_path / "cache").mkdir()

    def answer():
        build.library.cache_clear()
        return build.library("float").answer()

    yield tmp_path / "cache", tmp_path / "cache" / f"polarlm-native-{os.getuid()}", answer
    build.library.cache_clear()


def test_compiled_code_that_was_exchanged_is_not_loaded(answers):
    _, private, answer = answers
    assert answer() == 42 and private.stat().st_mode & 0o777 == 0o700
    (made,) = private.glob("*.so")
    content = made.read_bytes()
    made.unlink()  # a file that is loaded must not be written to
    made.write_bytes(b"not what was compiled")
    assert answer() == 42 and made.read_bytes() == content
    made.unlink()
    (private.parent / "planted.so").write_bytes(b"planted")
    made.symlink_to(private.parent / "planted.so")
    assert answer() == 42 and not made.is_symlink()


def test_a_folder_that_others_can_write_holds_no_code(answers, monkeypatch):
    cache, private, answer = answers
    private.mkdir()
    private.chmod(0o777)
    assert answer() == 42 and list(private.iterdir()) == []  # it went to the user's own cache
    private.rmdir()
    (cache / "theirs").mkdir()
    private.symlink_to(cache / "theirs")
    assert answer() == 42 and list((cache / "theirs").iterdir()) == []
    private.unlink()
    cache.chmod(0o777)  # without the sticky bit others could put their folder in the place of ours
    assert answer() == 42 and list(private.iterdir()) == []
    cache.chmod(0o1777)
    assert answer() == 42 and list(private.glob("*.so"))
    for path in private.iterdir():
        path.unlink()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)  # the folders belong to another user
    with pytest.raises(build.NotBuilt, match="writable only by you"):
        answer()


def test_a_lock_that_is_a_link_does_not_empty_the_file_behind_it(answers):
    cache, private, answer = answers
    assert answer() == 42
    (lock,) = private.glob("*.lock")
    (cache / "precious").write_text("mine")
    lock.unlink()
    lock.symlink_to(cache / "precious")
    with pytest.raises(build.NotBuilt):
        answer()
    assert (cache / "precious").read_text() == "mine"


def test_a_user_without_a_home_gets_a_folder_in_the_temporary_one(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", locations.CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what Python answers for an unknown user
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build.cache_folder() == tmp_path / f"polarlm-native-{os.getuid()}"
    monkeypatch.setenv(locations.CACHE_VARIABLE, str(tmp_path / "chosen"))
    assert build.cache_folder().parent == tmp_path / "chosen"


def test_python_and_native_agree_on_the_call():
    library = build.library("float")
    assert library.polarlm_rows_size() == passes.WORDS.size
    assert library.polarlm_call_size() == native_backend.ctypes.sizeof(native_backend.Call)
    assert library.polarlm_layer_size() == native_backend.ctypes.sizeof(native_decode._Layer)
    assert library.polarlm_decode_size() == native_backend.ctypes.sizeof(native_decode._Decode)
    assert native_backend.VECTOR_BYTES % library.polarlm_vector_bytes() == 0


def test_the_self_check_passes_and_draws_nothing():
    state = torch.get_rng_state()
    with torch.no_grad():
        actual = selfcheck.check(kernels.BACKENDS["native"].run, reference_attention, "cpu")
    assert actual.reason is None and actual.error < 1e-4
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fault", ["wrong number", "not a number", "crash"])
def test_auto_leaves_a_backend_that_fails_its_check(monkeypatch, fault):
    native = kernels.BACKENDS["native"]

    def broken(call):
        out = native.run(call)
        if fault == "crash":
            raise RuntimeError("illegal instruction")
        factor = 1.01 if fault == "wrong number" else float("nan")
        return replace(out, log_evidence=out.log_evidence * factor)

    monkeypatch.setitem(kernels.BACKENDS, "native", native._replace(run=broken))
    for remembered in (kernels._compared, kernels._warn_once):
        remembered.cache_clear()
    try:
        with pytest.warns(UserWarning, match="block.backend=native failed its check"):
            assert kernels.fastest(make_case(dtype=torch.float32).call(kernel="student")) == "streaming"
    finally:
        kernels._compared.cache_clear()
