"""A plan in words and numbers."""

from __future__ import annotations

from polarlm.columns import indented
from polarlm.training.planning.devices import DeviceMemory
from polarlm.training.planning.plan import ResourcePlan

ROOM = 0.9  # of a GPU's memory: the rest is for the driver, NCCL and fragmentation
LINES = ("weights", "gradients", "optimiser", "activations", "workspace", "parallel")
TITLES = {"workspace": "logits, workspace", "parallel": "buckets, gathered weights"}


def describe_plan(plan: ResourcePlan) -> str:
    """The whole plan."""
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
