"""What a GPU would run, on a claimed one; test_gpu_path.py runs this file in a process of its own.

BLOCKS in the environment: which blocks, all of configs/block by default.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from polarlm.attention.parts.forgetting import running_sum
from polarlm.attention.robust import reference_attention
from polarlm.fast import backends, flex_backend, selfcheck
from polarlm.fast.selfcheck import Setup
from polarlm.model.build import build_model
from polarlm.training.hardware import compiled_loss
from polarlm.training.incidents import Incidents
from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm
from tests.gpu.claimed import GPU, Watch, claim, to_gpu
from tests.gpu.claimed_inductor import inductor, launches
from tests.training.tiny_jobs import ROOT, composed

claim()
EVERY = sorted([*(path.stem for path in (ROOT / "configs" / "block").glob("*.yaml")), "polar_constant"])
BLOCKS = os.environ.get("BLOCKS", " ".join(EVERY)).split()
COMPILED = os.environ.get("COMPILED", " ".join(EVERY)).split()
# Blocks whose attention goes through robust attention and that a kernel of ours can take.
ON_TRITON = {
    "fox", "polar", "polar_constant", "polar_paper", "rfa", "standard_forgetting", "xsa_forgetting",
}  # fmt: skip


# Most launches, forward and backward, of one layer, the embedding and the loss.
LAUNCHES = {"polar": (38, 44), "standard_strong": (26, 41), "xsa_forgetting": (33, 44)}


@pytest.fixture(autouse=True)
def _trusted_kernels(monkeypatch):
    """There are no numbers to compare; every choice is made anew."""
    monkeypatch.setattr(backends, "distrust", lambda backend, device, setup=None: None)
    monkeypatch.setattr(backends, "_choices", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(tmp_path: Path, block: str, mode: FakeTensorMode, *switches: str):
    size = ("model.d_model=128", "model.n_head=2", "model.n_layer=2", "model.context=256")
    config = composed(tmp_path, f"block={block}", *size, *switches)
    model = build_model(config, 1000)
    backends.forget_choices()  # of measurements while it was built
    return config, to_gpu(model, mode)


def watched_step(tmp_path: Path, block: str, documents: bool, *switches: str) -> Watch:
    """What a step of training, with its optimiser and the guard against gradients that are not finite, does."""
    mode = FakeTensorMode()
    config, model = build(tmp_path, block, mode, *switches)
    unused: Any = None
    asks = dict(is_read_step=unused, discard=unused, settle=unused)
    watcher = Incidents(tmp_path, policy="skip", limit=1, spike_z=0, **asks)
    with mode, Watch() as watch:
        optimiser = build_optimiser(config["optim"], model)
        tokens = torch.zeros(2, 256, dtype=torch.long, device=GPU)
        ids = torch.zeros_like(tokens) if documents else None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model.loss(tokens, tokens, documents=ids, reduction="sum").backward()
        gradients = gradients_of(model.parameters())
        watcher.suppress(norm := total_norm(gradients), 1, optimiser)
        clip(gradients, norm, 1.0)
        optimiser.step()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            model.tally(tokens, tokens, documents=ids)
    assert all(p.grad is not None and p.grad.device == GPU for p in model.parameters() if p.requires_grad)
    return watch


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_training_step_and_a_validation_never_wait_for_the_gpu(tmp_path, block, documents):
    watch = watched_step(tmp_path, block, documents)
    assert watch.waits == []
    if block in ON_TRITON:
        assert {choice.backend for choice in backends.choices()} == {"triton"}
        assert watch.operators["polarlm.triton_forward.default"] and watch.operators["polarlm.triton_backward.default"]


def test_a_step_of_muon_never_waits_for_the_gpu(tmp_path):
    assert watched_step(tmp_path, "standard", False, "optim=muon", "model.n_layer=1").waits == []


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_decoding_token_by_token(tmp_path, block):
    mode = FakeTensorMode()
    _, model = build(tmp_path, block, mode)
    model.eval()
    with mode, torch.autocast("cuda", dtype=torch.bfloat16):
        cache = model.new_cache(1, 16)
        for length in (5, 1, 1):
            logits = model(torch.zeros(1, length, dtype=torch.long, device=GPU), cache=cache)
    assert logits.device == GPU and logits.shape[-1] == 1000


@pytest.mark.parametrize("block", COMPILED)
def test_a_compiled_step_is_one_graph_of_generated_code_with_our_kernels_in_it(tmp_path, block):
    mode = FakeTensorMode()
    _, model = build(tmp_path, block, mode, "model.n_layer=1")
    with mode, inductor() as (backend, codes), torch.autocast("cuda", dtype=torch.bfloat16):
        tokens = torch.zeros(2, 256, dtype=torch.long, device=GPU)
        step = torch.compile(model.loss, backend=backend, fullgraph=True)
        step(tokens, tokens, documents=None, reduction="sum").backward()
    forward, backward = codes
    assert "polarlm.linear_cross_entropy" in forward
    if block in LAUNCHES:
        assert all(count <= most for count, most in zip(map(launches, codes), LAUNCHES[block]))
    if block in ON_TRITON:
        assert "polarlm.triton_forward" in forward and "polarlm.triton_backward" in backward
        assert "logsumexp" not in forward, "no chunk of plain attention"


nightly = pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="the other stays in CI: POLARLM_NIGHTLY=1")
FLEX = [  # of fox and of polar
    Setup(torch.bfloat16, kernel="exponential", residual_form="dot", magnitude=False, forgets=True, radial=None),
    pytest.param(Setup(torch.bfloat16, 64, shape_learns=False, forgets=True, radial=None), marks=nightly),
]


@pytest.mark.parametrize("setup", FLEX)
def test_flex_attention_trains(monkeypatch, setup):
    """Inductor refuses a tensor that wants a gradient and is indexed twice, and fails at one that has no effect."""
    flex_backend._causal.cache_clear()
    with FakeTensorMode(), inductor() as (backend, codes):
        compiled = torch.compile(flex_attention, backend=backend, dynamic=False)
        monkeypatch.setattr(flex_backend, "_function", lambda fused: compiled)
        results = selfcheck.passes(flex_backend.flex_attention, GPU, setup)
    flex_backend._causal.cache_clear()
    assert len(codes) == 2 and all(x.device == GPU for x in results)


def test_backends_are_compared_for_what_will_be_compiled_before_it_is(tmp_path, monkeypatch):
    """The first row once went through without gradients, where a ν that learns looks like one that does not."""
    asked = []

    def ask(backend, device, setup=None):
        asked.append((Setup(*setup).shape_learns, torch.compiler.is_compiling()))

    monkeypatch.setattr(backends, "distrust", ask)
    mode = FakeTensorMode()
    _, model = build(tmp_path, "polar", mode, "block.frozen=[alpha]", "model.n_layer=1")
    torch._dynamo.reset()
    with mode, torch.autocast("cuda", dtype=torch.bfloat16):
        tokens = torch.zeros(2, 256, dtype=torch.long, device=GPU)
        compiled_loss(model, backend="eager", fullgraph=True)(tokens, tokens)
    assert asked[0] == (True, False)
    assert {learns for learns, _ in asked} == {True}


def test_deterministic_training_needs_no_cumsum(tmp_path):
    """CUDA's cumsum of floats has no deterministic form and refuses to run where one is asked for."""
    torch.use_deterministic_algorithms(True)
    try:
        mode = FakeTensorMode()
        _, model = build(tmp_path, "polar", mode)
        with mode, Watch() as watch, torch.autocast("cuda", dtype=torch.bfloat16):
            tokens = torch.zeros(2, 256, dtype=torch.long, device=GPU)
            model.loss(tokens, tokens, documents=None, reduction="sum").backward()
            # The check of the kernels too: what it cannot do is taken for a fault of theirs.
            selfcheck.passes(reference_attention, GPU, Setup(shape_learns=False, forgets=True))
            call = selfcheck.small_call(GPU, Setup())
            assert "in no fixed order" in str(flex_backend.flex_obstacle(call)), "its compiled code has atomic adds"
        assert not [name for name, times in watch.operators.items() if "cumsum" in name and times]
        with mode:
            assert running_sum(torch.zeros(2, 3, 7, device=GPU), 1).shape == (2, 3, 7)
    finally:
        torch.use_deterministic_algorithms(False)


def test_masked_documents_with_grouped_heads_stay_on_a_fused_kernel(tmp_path, monkeypatch):
    """No fused kernel takes a mask and grouped heads at once."""
    from polarlm.attention import standard

    seen = []
    attend = standard.F.scaled_dot_product_attention

    def watched(q, k, v, *, attn_mask=None, enable_gqa=False, **options):
        seen.append(attn_mask is not None and (enable_gqa or q.shape[1] != k.shape[1]))
        return attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    mode = FakeTensorMode()
    _, model = build(tmp_path, "standard", mode, "model.n_head=4", "model.n_kv_head=2")
    monkeypatch.setattr(standard.F, "scaled_dot_product_attention", watched)
    with mode, torch.autocast("cuda", dtype=torch.bfloat16):
        tokens = torch.zeros(2, 256, dtype=torch.long, device=GPU)
        model.loss(tokens, tokens, documents=torch.zeros_like(tokens), reduction="sum").backward()
    assert seen == [False, False]
