"""The counted memory of a step against what torch's allocator really gave out for one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.model import GPT
from polarlm.model.build import build_model
from polarlm.operations import closed
from polarlm.training.gpus import GPUS, peak_flops
from polarlm.training.memory import LiveBytes, Shape, StepMemory, device_memory, step_memory, traffic
from polarlm.training.optimisers import build_optimiser
from polarlm.training.plan import shape_of
from tests.training.lonely_rank import rank_zero

VOCABULARY, LAYERS = 700, 4
SMALL = ("model.d_model=64", "model.n_head=4", "model.context=64")


@pytest.fixture(autouse=True)
def _operators_of_any_device():
    """Fake tensors take torch's own operators, as a GPU does; so does what they are compared with."""
    with closed():
        yield


def settings(block: str, *more: str) -> dict[str, Any]:
    job = plan_jobs(config_loader(), "train", [f"block={block}", *SMALL, *more], multirun=False).jobs[0]
    assert job.config is not None
    return job.config


def builder(config: dict[str, Any]):
    def build(layers: int) -> GPT:
        other = copy.deepcopy(config)
        other["model"]["n_layer"] = layers
        return build_model(other, VOCABULARY)

    return build


def allocated_peak(model: GPT, optim: dict[str, Any], rows: int, precision: str, accumulate: int) -> int:
    """Bytes of weights and optimiser, and the most that a real step has allocated beside them (torch's profiler)."""
    model = model.to(torch.bfloat16 if precision == "bf16-true" else torch.float32).train()
    optimiser = build_optimiser(optim, model)
    tokens = torch.randint(0, VOCABULARY, (rows, model.config.context))

    def step() -> None:
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.endswith("-mixed")):
                loss = model.loss(tokens, tokens, reduction="sum") / tokens.numel()
            loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    step()
    held = list(model.parameters()) + [x for state in optimiser.state.values() for x in state.values()]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in held]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    sizes = [event.typed[1].alloc_size for event in allocations(recorded)]
    return sum(x.untyped_storage().nbytes() for x in local) + max(torch.tensor(sizes).cumsum(0).tolist())


def allocations(recorded: Any) -> list[Any]:
    from torch._C._profiler import _EventType

    waiting, events = list(recorded.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.typed[0] == _EventType.Allocation:
            events.append(event)
    return sorted(events, key=lambda event: event.start_time_ns)


CASES = [
    ("standard", "32-true", 16, 1, ()),
    ("standard", "bf16-mixed", 8, 1, ("model.checkpointing=true",)),
    ("polar", "32-true", 4, 2, ("model.ffn=gelu", "model.tie_embeddings=false")),
    ("polar", "bf16-mixed", 3, 2, ("model.context=128",)),
    ("rfa", "bf16-true", 6, 1, ("model.n_kv_head=2",)),
    ("xsa", "32-true", 2, 1, ("model.d_model=128",)),
    ("polar_paper", "32-true", 4, 1, ()),
    ("polar_literal", "32-true", 4, 1, ()),
]


def peak_alone(step):
    """What one device without others holds at most."""
    return device_memory(step, SHAPE, "ddp", 1).peak


@pytest.mark.parametrize(("block", "precision", "rows", "accumulate", "more"), CASES)
def test_the_estimate_is_within_a_tenth_of_what_is_allocated(block, precision, rows, accumulate, more):
    config = settings(block, *more)
    options = {"rows": rows, "precision": precision, "optim": config["optim"], "accumulate": accumulate}
    estimate = peak_alone(step_memory(builder(config), LAYERS, **options))
    measured = allocated_peak(builder(config)(LAYERS), config["optim"], rows, precision, accumulate)
    assert estimate == pytest.approx(measured, rel=0.1)


def test_deep_models_are_what_two_and_three_layers_say():
    """Counted with all its layers, a model has the same peak as the one that was extended."""
    config = settings("standard")
    options = {"rows": 4, "precision": "32-true", "optim": config["optim"], "accumulate": 1}
    extended = step_memory(builder(config), 9, **options)
    whole = step_memory(lambda layers: builder(config)(layers + 6), 3, **options)  # nine layers, counted
    assert extended == whole


def test_live_bytes_counts_a_storage_once_and_until_it_is_freed():
    with LiveBytes() as live:
        a = torch.ones(100)
        b = a.view(10, 10)
        assert live.now == 400
        c = a + 1
        assert (live.now, live.peak) == (800, 800)
        del c, a
        assert (live.now, live.peak) == (400, 800)
        del b
    assert live.now == 0


# -- many devices: against numbers by hand -----------------------------------------------------------------------------

STEP = StepMemory(400, 400, 800, 5000, 100, 80, 50, 40, 30, accumulates=True)
SHAPE = Shape(block=30, layers=10, outside=100)


def test_ddp_holds_everything_and_its_buckets():
    held = device_memory(STEP, SHAPE, "ddp", 8)
    assert (held.weights, held.gradients, held.optimiser, held.parallel) == (400, 400, 800, 400)
    assert held.peak == 400 + 400 + 800 + 5000 + 100 + 400
    assert peak_alone(STEP) == 6700


def test_fsdp_holds_a_share_and_what_is_gathered():
    held = device_memory(STEP, SHAPE, "fsdp", 8)
    assert (held.weights, held.gradients, held.optimiser) == (50, 50, 100)
    # In the last block: the outside and its gradients whole, the block and the next one gathered.
    assert held.peak == 200 + 5000 + 80 + 2 * 100 + 2 * 30
    # With little else to hold: a block further on, also its gradients and the buffer of those before.
    deep = dataclasses.replace(STEP, activations=100, accumulates=False)
    assert device_memory(deep, SHAPE, "fsdp", 8).peak == 200 + 50 + 10 + 2 * 100 + 4 * 30


SHARDED = [
    ("standard", "32-true", 8, 1, ("model.d_model=128",)),  # fullest at the logits
    ("standard", "32-true", 8, 1, ("model.d_model=256", "model.context=32")),  # in the middle of the backward pass
    ("standard", "32-true", 4, 2, ("model.d_model=128",)),
    ("standard", "bf16-mixed", 4, 1, ("model.d_model=128", "model.checkpointing=true")),  # at its end
    ("standard", "32-true", 512, 1, ("model.d_model=256", "model.checkpointing=true")),  # more ranks than rows
]


@pytest.mark.parametrize(("block", "precision", "world", "accumulate", "more"), SHARDED)
def test_fsdp_is_planned_within_a_tenth_of_what_one_rank_allocates(block, precision, world, accumulate, more):
    config = settings(block, *more)
    options = {"rows": 2, "precision": precision, "optim": config["optim"], "accumulate": accumulate}
    step = step_memory(builder(config), LAYERS, **options)
    model = builder(config)(LAYERS)
    planned = device_memory(step, shape_of(model, 4, world), "fsdp", world).peak
    assert planned < 0.75 * peak_alone(step)  # or there would be nothing to test
    with rank_zero(world, model, config["optim"]) as module:
        measured = allocated_peak(module.model, config["optim"], 2, precision, accumulate)
    assert planned == pytest.approx(measured, rel=0.1)


def test_bytes_sent_in_rings():
    options = {"devices": 4, "per_node": 8, "accumulate": 3}
    h100 = GPUS["h100"]
    ddp = traffic(SHAPE, 400, "ddp", h100, **options)
    assert ddp.sent == pytest.approx(2 * 3 / 4 * 400) and ddp.seconds == pytest.approx(ddp.sent / 450e9)
    fsdp = traffic(SHAPE, 400, "fsdp", h100, **options)
    assert fsdp.sent == pytest.approx(3 * 3 / 4 * (400 + 300 + 400))
    far = traffic(SHAPE, 400, "ddp", h100, devices=16, per_node=8, accumulate=1)
    assert far.link == "network" and far.seconds == pytest.approx(2 * 15 / 16 * 400 / 50e9)


def test_published_peaks():
    assert peak_flops(GPUS["h100"], "bf16-mixed") == 989.4e12
    assert peak_flops(GPUS["h100"], "32-true") == 494.7e12  # as TF32
    assert peak_flops(GPUS["a100"], "16-mixed") == 312e12
    for gpu in GPUS.values():
        assert peak_flops(gpu, "16-mixed") > peak_flops(gpu, "32-true") > 8e12
