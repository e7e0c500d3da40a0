"""Code that only a GPU machine runs, run here as far as torch allows: stand-ins for the device, real decisions.

What even this does not reach is listed in docs/scaling.md; tests/test_gpu_code.py holds that list to the code.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polarlm.launch.accept import all_blocks
from polarlm.training.hardware import (
    choose_accelerator,
    choose_compile,
    choose_precision,
    compiled_loss,
    use_tensor_cores,
)
from tests.training.tiny_jobs import composed

GPU = torch.device("cuda", 0)
FAKE = FakeTensorMode()


@pytest.fixture
def two_gpus(monkeypatch):
    """torch and Lightning believe in two H100s; whoever touches one fails."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("lightning.pytorch.accelerators.cuda.num_cuda_devices", lambda: 2)


def test_auto_is_cuda_in_bf16_compiled(two_gpus):
    assert choose_accelerator("auto") == choose_accelerator("gpu") == choose_accelerator("cuda") == "cuda"
    assert choose_precision("auto", "cuda").value == "bf16-mixed"
    assert choose_compile("auto", "cuda", "polar", 1e9, 10).value == "yes"


def test_a_gpu_without_bf16_trains_in_fp32(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_precision("auto", "cuda").value == "32-true"


def test_fp32_products_use_tensor_cores():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        use_tensor_cores()
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_trainer_of_a_gpu_run(two_gpus, monkeypatch, tmp_path, strategy):
    """Our own path up to Lightning's loop: devices, NCCL, autocast on cuda, the published peak."""
    import lightning.pytorch as pl

    from polarlm.training.job import build_job
    from polarlm.training.loop import fit

    seen = {}

    def stop_here(trainer, module, **_):
        recorder = next(c for c in trainer.callbacks if type(c).__name__ == "Recorder")
        seen.update(trainer=trainer, module=module, peak=recorder.peak.best)

    monkeypatch.setattr(pl.Trainer, "fit", stop_here)
    switches = (f"trainer={strategy}", "trainer.accelerator=auto", "trainer.precision=auto")
    job = build_job(composed(tmp_path, *switches))
    assert (job.accelerator, job.precision, job.compiled, job.plan.processes) == ("cuda", "bf16-mixed", True, 2)
    fit(job, tmp_path / "run")
    plugin, trainer = seen["trainer"].strategy.precision_plugin, seen["trainer"]
    assert [str(device) for device in trainer.strategy.parallel_devices] == ["cuda:0", "cuda:1"]
    assert trainer.strategy._get_process_group_backend() == "nccl"
    assert (plugin.precision, plugin.device) == ("bf16-mixed", "cuda")
    assert seen["peak"] == 2 * 989.4e12


def test_batches_are_pinned_where_there_is_a_gpu(two_gpus, monkeypatch):
    from polarlm.data.module import Prefetched

    pinned = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batches = [{"tokens": torch.arange(3), "targets": torch.arange(3)} for _ in range(2)]
    assert [list(b) for b in Prefetched(lambda: batches, 2)] == [["tokens", "targets"]] * 2
    assert len(pinned) == 4


def test_a_watched_step_waits_for_the_gpu(monkeypatch):
    from types import SimpleNamespace

    from polarlm.training.recorder import StepTimes

    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    times = StepTimes(SimpleNamespace(paused=0.0))  # type: ignore[arg-type]
    times.spent = {"forward": 0.0}
    times._mark(SimpleNamespace(device=GPU), "forward")
    times._mark(SimpleNamespace(device=torch.device("cpu")), "forward")
    assert waited == [GPU]


def test_gpus_are_named(two_gpus, monkeypatch):
    from types import SimpleNamespace

    from polarlm.launch.doctor import device, timed
    from polarlm.runs.folder import environment

    waited = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("cuda"))
    assert environment()["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert [check[1:] for check in device()] == [(f"cuda:{i}", "NVIDIA H100 80GB HBM3, 80 GB") for i in (0, 1)]
    timed(lambda: None, "cuda", repeats=2)
    assert len(waited) == 3


def test_a_run_is_restored_onto_the_gpu(two_gpus, monkeypatch, tmp_path):
    from polarlm.model import GPT
    from polarlm.runs.restore import restore_run
    from polarlm.training.loop import train_run

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr("polarlm.training.hardware.measured_peak", lambda **_: 1e9)
        folder = train_run({**composed(tmp_path, "name=run", "sample.tokens=2"), "group": None}).folder
    moved = []
    monkeypatch.setattr(GPT, "to", lambda self, device: moved.append(device) or self)
    restore_run(folder)
    restore_run(folder, "cpu")
    assert moved == ["cuda", "cpu"]


# -- fake tensors: a device and a shape, no numbers --------------------------------------------------------------------


def composed_block(block: str, *more: str) -> dict:
    from pathlib import Path
    from tempfile import gettempdir

    return composed(Path(gettempdir()), f"block={block}", "model.d_model=64", "model.n_head=2", *more)


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that claims to be on the GPU; to be used inside FAKE."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(FAKE, torch.empty(shape, dtype=dtype, device="meta"), GPU)


def call_on_gpu(dtype: torch.dtype = torch.bfloat16, size: int = 32, **options):
    from polarlm.attention.robust import DirectionalNoise, RobustCall

    of_heads = [fake(4, dtype=torch.float32) for _ in range(6)]
    noise = DirectionalNoise(*of_heads[:5], nu=of_heads[5])
    q, k, v = fake(2, 4, 16, size, dtype=dtype), *(fake(2, 2, 16, size, dtype=dtype) for _ in range(2))
    return RobustCall(q, k, v, noise, "student", magnitude=fake(2, 16, dtype=torch.float32), **options)


def test_attention_on_a_gpu_takes_the_triton_kernels_and_stays_there(monkeypatch):
    from polarlm.attention.robust import robust_attention
    from polarlm.fast import backends as kernels
    from polarlm.fast import triton_backend

    chosen = []
    monkeypatch.setattr(triton_backend, "INSTALLED", True)
    monkeypatch.setattr(kernels, "distrust", lambda backend, device, setup: chosen.append((backend, device)))
    with FAKE, torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            out = robust_attention(call_on_gpu(dtype))
            assert (out.v_bar.device, out.v_bar.dtype, out.v_bar.shape) == (GPU, dtype, (2, 4, 16, 32))
            assert (out.log_evidence.device, out.log_evidence.dtype) == (GPU, torch.float32)
        assert chosen == [("triton", "cuda")] * 2
        for other in ({"dtype": torch.float64}, {"dropout": 0.1}):  # what neither those kernels nor flex can do
            assert kernels.fastest(call_on_gpu(**other)) == "streaming"
        assert kernels.fastest(call_on_gpu(size=256)) == "flex"
    assert {backend for backend, _ in chosen} == {"triton", "flex"}


nightly = pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="every block: POLARLM_NIGHTLY=1")
EVERY = [pytest.param(4, f"block={name}", marks=nightly) for name in all_blocks()]


@pytest.mark.parametrize(("world", "switch"), [(512, "block=polar"), (4, "block.value_residual=true"), *EVERY])
def test_a_sharded_step_among_many_ranks(world, switch):
    """FSDP2's shards, norm and clipping as rank 0 of `world` sees them."""
    from polarlm.model.build import build_model
    from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm
    from tests.training.lonely_rank import rank_zero

    config = composed_block("polar", switch)
    model = build_model(config, 1024)
    whole = model.embedding.weight.shape[0]
    with rank_zero(world, model, config["optim"]) as module:
        assert module.model.embedding.weight.to_local().shape[0] == -(-whole // world)
        optimiser = build_optimiser(config["optim"], module.model)
        tokens = torch.zeros(1, 16, dtype=torch.long)
        batch = {"tokens": tokens, "targets": tokens, "counted": torch.tensor(16.0)}
        module.training_step(batch, 0).backward()
        gradients = gradients_of(module.model.parameters())
        clip(gradients, total_norm(gradients), 1.0)
        optimiser.step()
        assert len(gradients) == len(list(module.model.parameters()))


@pytest.mark.parametrize("block", ["standard", pytest.param("polar", marks=nightly)])
def test_a_compiled_model_inside_ddp_has_its_own_gradients(tmp_path, block):
    """DDP cuts the graph where its buckets end; here two of them, and the loss is one operator of ours."""
    import torch.distributed as dist

    from polarlm.model.build import build_model
    from polarlm.training.module import LanguageModel

    config = composed_block(block, "model.d_model=128", "model.n_layer=1")
    model = build_model(config, 4096)
    tokens = torch.randint(4096, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(model.loss(tokens, tokens, reduction="sum"), list(model.parameters()))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch._dynamo.reset()
    try:
        module = LanguageModel(model)
        module._loss = compiled_loss(model, backend="aot_eager")
        module.forward = lambda batch: module.training_step(batch, 0)  # through which Lightning's DDP enters too
        wrapped = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
        wrapped({"tokens": tokens, "targets": tokens, "counted": torch.tensor(1.0)}).backward()
    finally:
        dist.destroy_process_group()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)
