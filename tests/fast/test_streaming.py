"""Streaming in plain torch equals the reference in every output and gradient, in memory that grows with the length."""

import dataclasses

import pytest
import torch

from polarlm.attention.robust import KERNELS, streaming
from polarlm.errors import UserError
from polarlm.fast.backends import BACKENDS
from tests.fast.cases import assert_same, make_case, run


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", 5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize(("decay_keys", "decay_values"), [(False, False), (True, True)])
@pytest.mark.usefixtures("small_chunks")
def test_every_switch_in_float64(kernel, magnitude, decay_keys, decay_values):
    case = make_case(magnitude=magnitude, process=decay_keys)
    assert_same(case, "streaming", 1e-9, kernel=kernel, decay_keys=decay_keys, decay_values=decay_values)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("small_chunks")
def test_a_past_that_fades(kernel):
    assert_same(make_case(queries=7, keys=23, forgets=0.5), "streaming", 1e-9, kernel=kernel)


@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (7, 23)])
@pytest.mark.usefixtures("small_chunks")
def test_every_chunk_has_the_variances_of_its_own_queries_and_keys(queries, keys):
    case = make_case(queries=queries, keys=keys)
    variances = dict(
        log_query_variance=torch.randn(2, 4, queries, dtype=torch.float64) - 1,
        log_key_variance=torch.randn(2, 4, keys, dtype=torch.float64) - 1,
    )
    assert_same(case, "streaming", 1e-9, kernel="student", **variances)


@pytest.mark.parametrize("correlation", ["vv", "qk", "one"])
@pytest.mark.parametrize("radial_mode", ["own", "shared"])
@pytest.mark.parametrize("backend", ["native", "streaming"])
@pytest.mark.parametrize("groups", [4, 2])
def test_every_backend_follows_the_radial_correlation_or_refuses(backend, radial_mode, correlation, groups):
    case = make_case(queries=9, groups=groups)
    options = dict(kernel="student", radial_mode=radial_mode, radial_correlation=correlation)
    if BACKENDS[backend].obstacle(case.call(**options)):
        with pytest.raises(UserError):
            run(case, backend, **options)
    else:
        assert_same(case, backend, 1e-9, **options)


@pytest.mark.parametrize("radial_mode", ["own", "shared"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (7, 23)])
@pytest.mark.usefixtures("small_chunks")
def test_radial_channel_cache_and_documents(radial_mode, packed, queries, keys):
    case = make_case(queries=queries, keys=keys)
    documents = (torch.arange(keys) // 6).expand(2, keys) if packed else None
    assert_same(case, "streaming", 1e-9, kernel="student", radial_mode=radial_mode, documents=documents)


@pytest.mark.parametrize("backend", ["native", "streaming"])
@pytest.mark.usefixtures("small_chunks")
def test_memory_stays_linear_in_length(backend):
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
            run(case, backend, kernel="student", radial_mode="own")
        sizes.append(largest)
    assert sizes[1] < 2.5 * sizes[0]


def test_what_a_small_call_needs_backward_is_kept_and_what_a_large_one_needs_is_formed_again(monkeypatch):
    case, kept = make_case(queries=40, dtype=torch.float32), {}

    def pack(x):
        kept[pairs].append(x.numel())
        return x

    for pairs in (0, 2**19):
        monkeypatch.setattr(streaming, "KEPT", pairs)
        kept[pairs] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            streaming.streaming_attention(case.call(kernel="student"))
    assert max(kept[0], default=0) < 40 * 40 <= max(kept[2**19])


@pytest.mark.parametrize("backend", ["native", "streaming"])
def test_gradient_of_the_decay_survives_long_lags_without_floors(backend):
    """κ does not depend on the lag then: large terms with opposite signs must cancel pair by pair, not in sums."""
    case = make_case(batch=1, heads=2, groups=1, queries=2, keys=100_000, dtype=torch.float32)
    with torch.no_grad():
        case.noise.mu.fill_(0.01)
        case.noise.m_inf2.zero_()
        case.noise.sigma02.zero_()
    if BACKENDS[backend].obstacle(case.call(kernel="student")):
        pytest.skip("not on this machine")
    _, exact = run(_double(case), "reference", kernel="student")
    _, gradients = run(case, backend, kernel="student")
    truth = exact["noise.mu"]
    assert (gradients["noise.mu"].double() - truth).abs().max() < 0.03 * truth.abs().max()


def _double(x):
    if dataclasses.is_dataclass(x):
        return type(x)(**{name: _double(value) for name, value in vars(x).items()})
    return x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) else x
