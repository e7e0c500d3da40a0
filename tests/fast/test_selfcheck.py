"""The check that decides whether a kernel is used: under training's own settings, and for what training will run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polarlm.attention.robust import AttentionOutput, reference_attention
from polarlm.fast import backends as kernels
from polarlm.fast import selfcheck
from polarlm.fast.selfcheck import Setup
from polarlm.model.build import build_model
from polarlm.training.hardware import compiled_loss, use_tensor_cores
from tests.training.tiny_jobs import composed


def rounded(x: Tensor) -> Tensor:
    """To the ten bits of mantissa that TF32 has."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Ampere(TorchDispatchMode):
    """Matrix products of fp32 numbers as a GPU with TF32 forms them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        if (
            function in products
            and args[0].dtype == torch.float32
            and torch.get_float32_matmul_precision() != "highest"
        ):
            args = tuple(rounded(x) for x in args)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def training():
    """TF32 products allowed, as training allows them."""
    before = torch.get_float32_matmul_precision()
    use_tensor_cores()
    yield
    torch.set_float32_matmul_precision(before)


def test_a_right_kernel_passes_where_training_asked_for_tf32(training):
    # The native kernels stand for a GPU's: they use no TF32, the reference would.
    with Ampere():
        actual = selfcheck.check(kernels.BACKENDS["native"].run, reference_attention, "cpu")
    assert actual.reason is None and actual.error < 1e-4
    assert torch.get_float32_matmul_precision() == "high", "training's own products are TF32 again"


SETUPS = [
    Setup(torch.bfloat16, 64, group=1, shape_learns=False, forgets=True, packed=True, radial=None),
    Setup(torch.bfloat16, 128, group=4, process=True, decay_keys=True, decay_values=True, radial="one"),
    Setup(kernel="exponential", residual_form="dot", magnitude=False, forgets=True, shape_learns=False, radial=None),
    Setup(kernel="gaussian", shape_learns=False, radial="vv"),
]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_small_call_is_of_the_setup_that_it_is_asked_for(setup):
    assert Setup(*selfcheck.setup_of(selfcheck.small_call("cpu", setup))) == setup
    assert selfcheck.check(kernels.BACKENDS["streaming"].run, reference_attention, "cpu", [setup]).error == 0


def test_a_kernel_that_is_wrong_in_one_setup_is_only_used_in_the_others(monkeypatch):
    def wrong_with_documents(call):
        out = reference_attention(call)
        return out if call.documents is None else AttentionOutput(out.v_bar * 1.1, out.log_evidence, out.m_bar)

    right = kernels.BACKENDS["triton"]
    monkeypatch.setitem(kernels.BACKENDS, "triton", right._replace(run=wrong_with_documents))
    kernels._compared.cache_clear()
    try:
        with pytest.warns(UserWarning, match="block.backend=triton failed its check"):
            assert kernels.distrust("triton", "cpu", tuple(SETUPS[0]))
        assert kernels.distrust("triton", "cpu", tuple(SETUPS[1])) is None
    finally:
        kernels._compared.cache_clear()
        kernels._warn_once.cache_clear()


def test_a_gpu_without_kernels_is_said_aloud_and_the_reasons_are_kept(monkeypatch):
    """As where Triton fails its check and FlexAttention cannot drop weights."""
    kernels._warn_once.cache_clear()
    kernels.forget_choices()
    monkeypatch.setattr(kernels, "distrust", lambda backend, device, setup: "it differs")
    with pytest.warns(UserWarning, match=r"^Attention runs in plain torch, about ten times slower. triton: it"):
        assert kernels._choose("cuda", (None, "it does not drop weights"), None) == "streaming"
    (choice,) = kernels.choices()
    assert str(choice) == "streaming (triton: it differs; flex: it does not drop weights)"
    kernels.forget_choices()
    kernels._warn_once.cache_clear()


def test_kernels_are_compared_before_the_model_is_compiled_not_meanwhile(monkeypatch, tmp_path):
    """FlexAttention's check compiles too, and a compilation inside another made torch give up on the model."""
    meanwhile, checked = [], kernels.check

    def watched(*given):
        meanwhile.append(torch.compiler.is_compiling())
        with torch.enable_grad():
            torch.compile(torch.sin, backend="aot_eager")(torch.ones(3, requires_grad=True)).sum().backward()
        return checked(*given)

    model = build_model(composed(tmp_path, "block=polar", "block.frozen=[alpha]", "model.n_layer=1"), 64)
    flex = kernels.BACKENDS["flex"]
    monkeypatch.setitem(
        kernels.BACKENDS, "flex", flex._replace(run=kernels.BACKENDS["native"].run, obstacle=lambda call: None)
    )
    monkeypatch.setattr(kernels, "TRIED", {"cpu": ("flex",)})
    monkeypatch.setattr(kernels, "check", watched)
    kernels._compared.cache_clear()
    torch._dynamo.reset()
    try:
        tokens, before = torch.zeros(2, 16, dtype=torch.long), torch.get_rng_state()
        compiled_loss(model, backend="aot_eager", fullgraph=True)(tokens, tokens).backward()
    finally:
        kernels._compared.cache_clear()
    assert meanwhile == [False]
    assert torch.equal(before, torch.get_rng_state())
