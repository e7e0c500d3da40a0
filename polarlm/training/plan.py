"""The plan of a run on GPUs: batches, memory, communication, time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import nn

from polarlm.data.tokenizer import ByteTokenizer
from polarlm.errors import UserError
from polarlm.model import GPT
from polarlm.model.build import build_model
from polarlm.printing import indented
from polarlm.training.batching import BatchPlan, plan_batches, total_steps
from polarlm.training.gpus import GPUS, Gpu, PlanSettings, peak_flops
from polarlm.training.memory import DeviceMemory, Shape, Traffic, device_memory, traffic

# Published tokenizers whose size is known without reading them.
HUB_VOCABULARIES = {"openai-community/gpt2": 50_257}


@dataclass(frozen=True)
class ResourcePlan:
    """All numbers that `polarlm inspect --plan` prints."""

    config: dict[str, Any]
    settings: PlanSettings
    gpu: Gpu
    strategy: str
    precision: str
    parameters: int
    batch: BatchPlan
    steps: int
    memory: dict[tuple[str, bool], DeviceMemory]  # by (strategy, activation checkpointing)
    traffic: dict[str, Traffic]
    flops_per_token: int
    peak_flops: float

    @property
    def chosen(self) -> DeviceMemory:
        """Memory as the run is configured."""
        return self.memory[self.strategy, self.config["model"]["checkpointing"]]

    @property
    def compute_seconds(self) -> float:
        """Of one step at the assumed MFU; recomputed layers do a third more work that MFU does not count."""
        work = self.batch.tokens * self.flops_per_token / self.settings.gpus
        again = 4 / 3 if self.config["model"]["checkpointing"] else 1.0
        return again * work / (self.peak_flops * self.settings.mfu)

    def step_seconds(self, *, hidden: bool) -> float:
        """Of one step when communication is hidden behind the computation, or when none of it is."""
        sending = self.traffic[self.strategy].seconds
        return max(self.compute_seconds, sending) if hidden else self.compute_seconds + sending


def make_plan(config: dict[str, Any], settings: PlanSettings) -> ResourcePlan:
    """Plan a checked configuration of a run."""
    trainer, gpu = config["trainer"], GPUS[settings.gpu]
    per_node = min(settings.per_node, settings.gpus)
    context = config["model"]["context"]
    automatic = "bf16-mixed" if gpu.bf16 else "32-true"
    precision = automatic if trainer["precision"] == "auto" else trainer["precision"]
    if precision.startswith("bf16") and not gpu.bf16:
        raise UserError(f"trainer.precision={precision}: a {gpu.title} has no bf16; choose 16-mixed or 32-true.")
    strategy = "ddp" if trainer["strategy"] == "auto" else trainer["strategy"]
    if trainer["micro_batch_tokens"] == "auto":
        from polarlm.training.batching import fitting_tokens

        size = settings.vocab or vocabulary_of(config["tokenizer"])
        tokens = next(fitting_tokens(config, size, precision, settings.gpus, gpu.memory * 1e9))
        trainer = {**trainer, "micro_batch_tokens": tokens}
        config = {**config, "trainer": trainer}
    batch = plan_batches(trainer["batch_tokens"], context, settings.gpus, trainer["micro_batch_tokens"])
    vocabulary = settings.vocab or vocabulary_of(config["tokenizer"])
    model = untouched_model(config, vocabulary)
    shape = shape_of(model, weight_bytes(precision), settings.gpus)
    memory, sent = {}, {}
    for recompute in (False, True):
        step = count_step(config, vocabulary, batch, precision, recompute=recompute)
        for kind in ("ddp", "fsdp"):
            memory[kind, recompute] = device_memory(step, shape, kind, settings.gpus)
            options = {"devices": settings.gpus, "per_node": per_node, "accumulate": batch.accumulate}
            sent[kind] = traffic(shape, step.gradients, kind, gpu, **options)
    return ResourcePlan(
        config, settings, gpu, strategy, precision, model.parameter_count(), batch,
        total_steps(trainer["max_steps"], trainer["max_tokens"], batch.tokens), memory, sent,
        model.flops_per_token(context), peak_flops(gpu, precision),
    )  # fmt: skip


def vocabulary_of(tokenizer: dict[str, Any]) -> int:
    """Vocabulary size of a tokenizer, also of one that has not been trained yet."""
    kind, size = tokenizer["kind"], tokenizer.get("vocab_size")
    if kind == "byte":
        return ByteTokenizer.vocab_size
    known = HUB_VOCABULARIES.get(tokenizer.get("hub") or "") if kind == "hub" else size
    if known is None:
        raise UserError(f"The size of this {kind} tokenizer is not known before it is made; give it as vocab=50257")
    return int(known)


def count_step(config: dict[str, Any], vocabulary: int, batch: BatchPlan, precision: str, *, recompute: bool) -> Any:
    """The memory of a step of this run on one GPU."""
    from polarlm.model.loss import CHUNK_LOGITS
    from polarlm.training.memory import step_memory

    def build(layers: int) -> GPT:
        other = copy.deepcopy(config)
        other["model"] |= {"n_layer": layers, "checkpointing": recompute}
        return untouched_model(other, vocabulary)

    with patch.dict(CHUNK_LOGITS, cpu=CHUNK_LOGITS["cuda"]):  # the step is counted here as it will be there
        return step_memory(
            build,
            config["model"]["n_layer"],
            rows=batch.micro,
            precision=precision,
            optim=config["optim"],
            accumulate=batch.accumulate,
        )


def untouched_model(config: dict[str, Any], vocabulary: int) -> GPT:
    """The model of a run with weights that hold no numbers and take no memory."""
    from polarlm.training.memory import UntouchedWeights

    # Without the measurement by which init=width scales a branch: these weights hold no numbers.
    model = {**config["model"], "init": "gpt2"}
    with UntouchedWeights():
        return build_model({**config, "model": model}, vocabulary)


def weight_bytes(precision: str) -> int:
    """Bytes of a weight."""
    return {"bf16-true": 2, "64-true": 8}.get(precision, 4)


def shape_of(model: GPT, element_size: int, devices: int = 1) -> Shape:
    """What FSDP gathers together: every block for itself, and all that is in no block; equal rows for every device."""

    def size(parameters: Iterable[nn.Parameter]) -> int:
        return sum(-(-p.shape[0] // devices) * devices * p[0].numel() for p in parameters) * element_size

    inside = [size(block.parameters()) for block in model.blocks]
    return Shape(max(inside), len(inside), size(model.parameters()) - sum(inside))


# -- in words and numbers ---------------------------------------------------------------------------------------------


ROOM = 0.9  # of a GPU's memory: the rest is for the driver, NCCL and fragmentation
LINES = ("weights", "gradients", "optimiser", "activations", "workspace", "parallel")
TITLES = {"workspace": "logits, workspace", "parallel": "buckets, gathered weights"}


def describe_plan(plan: ResourcePlan) -> str:
    """The plan as text."""
    return "\n".join([*_headline(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan), "", *_notes()])


def _headline(plan: ResourcePlan) -> list[str]:
    s, b, choices = plan.settings, plan.batch, plan.config["choices"]
    nodes = -(-s.gpus // s.per_node)
    how = plan.strategy if s.gpus > 1 else "alone"
    return [
        f"{choices['block']} block, {choices['model']} model, {plan.parameters:,} parameters, context {b.context:,}",
        f"{s.gpus} × {plan.gpu.title} in {nodes} node{'s' * (nodes > 1)}: {how}, {plan.precision}",
        f"a step: {b.tokens:,} tokens = {s.gpus} GPUs × {b.accumulate} micro-batches × {b.micro} windows "
        f"of {b.context:,}; {plan.steps:,} steps",
    ]


def _memory(plan: ResourcePlan) -> list[str]:
    columns = [(kind, again) for kind in ("ddp", "fsdp") for again in (False, True)]
    limit = plan.gpu.memory * 1e9
    chosen = (plan.strategy, plan.config["model"]["checkpointing"])
    head = [f"{c[0]}{' + recompute' * c[1]}{' *' * (c == chosen)}" for c in columns]
    rows = [[TITLES.get(line, line), *(_gb(getattr(plan.memory[c], line)) for c in columns)] for line in LINES]
    rows.append(["peak", *(_gb(plan.memory[c].peak) for c in columns)])
    rows.append([f"of {plan.gpu.memory:g} GB", *(_verdict(plan.memory[c], limit) for c in columns)])
    title = "Memory per GPU in GB (* as configured; recompute: model.checkpointing=true)"
    return [title, *indented([["", *head], *rows])]


def _verdict(memory: DeviceMemory, limit: float) -> str:
    share = memory.peak / limit
    return f"{share:.0%}" + ("" if share <= ROOM else ", tight" if share <= 1 else ", too much")


def _traffic(plan: ResourcePlan) -> list[str]:
    rows = [
        [kind, f"{t.sent / 1e9:.3g} GB", f"{1e3 * t.seconds:.3g} ms", _link(plan, t.link)]
        for kind, t in plan.traffic.items()
    ]
    return [
        "Sent by each GPU per step, and the time of its slowest link",
        *indented([["", "bytes", "time", "link"], *rows]),
    ]


def _link(plan: ResourcePlan, link: str) -> str:
    rate = {"network": plan.gpu.between, "node": plan.gpu.inside}.get(link)
    return "no other GPU" if rate is None else f"{link}, {rate:g} GB/s per direction"


def _time(plan: ResourcePlan) -> list[str]:
    best, worst = plan.step_seconds(hidden=True), plan.step_seconds(hidden=False)
    tokens = plan.batch.tokens
    hours = [plan.steps * seconds / 3600 for seconds in (worst, best)]
    rows = [
        ["FLOPs per token (counted)", f"{plan.flops_per_token:,}"],
        ["peak of a GPU", f"{plan.peak_flops / 1e12:,.1f} TFLOP/s ({plan.precision})"],
        ["step at this MFU", f"{1e3 * plan.compute_seconds:,.3g} ms (MFU {plan.settings.mfu:.0%})"],
        ["tokens per second", _range([tokens / worst, tokens / best], ",.0f")],
        ["hours", _range(hours, ".3g")],
        ["GPU hours", _range([plan.settings.gpus * h for h in hours], ".3g")],
    ]
    return ["Time (first number: no communication is hidden behind computation; second: all of it)", *indented(rows)]


def _range(numbers: list[float], form: str) -> str:
    return " … ".join(dict.fromkeys(format(number, form) for number in numbers))


def _notes() -> list[str]:
    return [
        "Counted: FLOPs (the model's own), bytes of a step (on fake tensors, with the CPU's kernels, not compiled).",
        "Published: memory, peak FLOP/s and bandwidth of the GPU. Assumed, never measured by us: the MFU (mfu=…), that "
        "links reach their published rate, that the data arrives in time.",
        f"Above {ROOM:.0%} of the memory is called tight: driver, NCCL and fragmentation take the rest.",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
