"""`polarlm accept`: one command that says whether a machine may be trusted to train, and how fast it is.

Every stage runs in a process of its own: what crashes, hangs or leaves a broken device is recorded, and the rest goes
on. The result is one JSON file and one page beside it. Without a GPU the same stages run on the CPU, as far as they
exist there; --fake runs the smallest version of each, to rehearse the command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from polarlm.block_keys import VARIANTS
from polarlm.errors import UserError
from polarlm.locations import CONFIGS
from polarlm.runs.files import read_json, write_json, write_text

LOSSES = Path(__file__).with_name("accept_losses.json")  # of a CPU: accept --write-losses
TINY = ("model.d_model=64", "model.n_head=2", "model.n_layer=2", "model.context=64", "tokenizer=byte", "data=text")
RACE = ("standard_strong", "xsa_forgetting", "polar")
VOCABULARY = 257
# What the verdict asks for. Speeds: from the instructions per pair in the compiled kernels (docs/gpu.md).
LOSS_TOLERANCE = 5e-3  # nats, after one step, from the CPU's
SLOWEST_KERNEL = 4.0  # times SDPA forward and backward, context 2,048 and longer
SLOWEST_STEP = 1.6  # times standard_strong, 124 M
LEAST_MFU = 0.3  # of standard_strong, 124 M
MEMORY_FACTOR = 1.15  # measured over planned


@dataclass(frozen=True)
class Bench:
    """Where the stages run, and how much of each."""

    device: str
    fake: bool

    @property
    def gpu(self) -> bool:
        """Whether there is something to measure."""
        return self.device == "cuda"


def add_parser(verbs: Any) -> None:
    """Add `polarlm accept`."""
    parser = verbs.add_parser("accept", help="test a GPU: numerics, every block, speed")
    parser.add_argument("--out", default="gpu-report.json", help="the report; a page lies beside it (.md)")
    parser.add_argument("--fake", action="store_true", help="rehearse: the smallest version of every stage, on the CPU")
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=list(STAGES), metavar="stage")
    parser.add_argument("--write-losses", action="store_true", help=argparse.SUPPRESS)  # on a CPU, when blocks change
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # one of them, in this process
    parser.set_defaults(run=accept)


def accept(options: argparse.Namespace) -> int:
    """Run the stages, write report and page; exit code 0 when nothing was refused."""
    import torch

    place = Bench("cuda" if torch.cuda.is_available() and not options.fake else "cpu", options.fake)
    out = Path(options.out)
    if options.write_losses:
        write_json(LOSSES, {name: block_losses(name, "cpu")[0] for name in all_blocks()})
        return 0
    if options.stage:
        write_json(out, STAGES[options.stage].run(place))
        return 0
    if out.suffix != ".json" or not out.parent.is_dir():
        raise UserError(f"--out {out} must be a .json file in a folder that exists")
    report: dict[str, Any] = {"fake": place.fake, "device": place.device, "stages": {}}
    for name in options.stages:
        began = time.perf_counter()
        print(f"{name} …", file=sys.stderr, flush=True)
        result = run_stage(name, options)
        report["stages"][name] = {**result, "seconds": round(time.perf_counter() - began, 1)}
        report["verdict"] = judge_stages(report["stages"], place)
        write_json(out, report)
        write_text(out.with_suffix(".md"), page(report))
    print(page(report))
    return 1 if any(check["state"] == "FAILED" for check in report["verdict"]) else 0


def run_stage(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a stage found, or {"error": …} with the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "polarlm", "accept", "--stage", name, "--out", str(answer)]
        process = subprocess.Popen(
            [*command, *(["--fake"] if options.fake else [])], start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=STAGES[name].limit)
            why = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not ready after {STAGES[name].limit} s"
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        if process.returncode == 0 and answer.exists():
            return read_json(answer)
        return {"error": f"{why}: {said.strip()[-1500:]}"}


# -- stages ------------------------------------------------------------------------------------------------------------


def environment_stage(place: Bench) -> dict[str, Any]:
    """Hardware, versions, and what `doctor` says."""
    from polarlm.launch.doctor import checks
    from polarlm.runs.folder import environment

    rows = [{"state": state, "what": what, "answer": answer} for state, what, answer in checks(offline=True)]
    return {"environment": environment(), "doctor": rows}


def numerics_stage(place: Bench) -> dict[str, Any]:
    """Every backend against the reference in fp64, with the inputs rounded as they are: outputs and gradients."""
    import torch

    from polarlm.fast.backends import BACKENDS
    from polarlm.fast.selfcheck import TOLERANCE, Setup, passes, small_call

    variants: dict[str, dict[str, Any]] = {
        "plain": {"radial": None, "group": 1, "shape_learns": False},
        "forgetting": {"forgets": True, "radial": None},
        "documents": {"packed": True, "radial": None},
        "GQA": {"group": 4, "radial": None},
        "radial": {"radial": "qk"},
        "ν learned": {"shape_learns": True, "radial": None},
    }
    sizes = (32,) if place.fake else (32, 64, 128)
    rows = []
    torch.set_float32_matmul_precision("highest")
    for (variant, fields_of), dtype, size in (
        (v, d, s) for v in variants.items() for d in (torch.float32, torch.bfloat16) for s in sizes
    ):
        setup = Setup(dtype=dtype, size=size, **fields_of)
        exact = passes(lambda call: exact_attention(call), place.device, setup)
        for name, backend in BACKENDS.items():
            row = {"backend": name, "variant": variant, "dtype": str(dtype).removeprefix("torch."), "head": size}
            if name == "reference" or (obstacle := backend.obstacle(small_call(place.device, setup))):
                if name != "reference":
                    rows.append({**row, "n/a": obstacle})
                continue
            once, again = (passes(backend.run, place.device, setup) for _ in range(2))
            error = max(largest_difference(a, b) for a, b in zip(exact, once))
            repeats = all(torch.equal(a, b) for a, b in zip(once, again))
            rows.append({**row, "error": error, "allowed": TOLERANCE[dtype], "repeatable": repeats})
    return {"rows": rows}


def exact_attention(call: Any) -> Any:
    """The reference in fp64 on the same numbers; outputs in the dtypes that backends give."""
    import torch

    from polarlm.attention.robust.reference import reference_attention

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def widened(part: Any) -> Any:
        return None if part is None else replace(part, **{f.name: wide(getattr(part, f.name)) for f in fields(part)})

    out = reference_attention(replace(widened(call), noise=widened(call.noise), radial=widened(call.radial)))
    narrow = {"v_bar": call.q.dtype, "log_evidence": torch.float32, "m_bar": torch.float32}
    named: dict[str, Any] = {name: getattr(out, name) for name in narrow}
    narrowed: dict[str, Any] = {name: None if x is None else x.to(narrow[name]) for name, x in named.items()}
    return replace(out, **narrowed)


def largest_difference(exact: Any, actual: Any) -> float:
    """The largest difference over the largest number; infinite for what is not finite."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    exact, actual = exact.double(), actual.double()
    return float((exact - actual).abs().max() / exact.abs().max().clamp_min(1e-6))


def blocks_stage(place: Bench) -> dict[str, Any]:
    """One eager and one compiled step of every block: losses against the CPU's, backend, graph breaks, memory."""
    expected = read_json(LOSSES) or {}
    rows = []
    for name in RACE if place.fake else all_blocks():
        for compiled in (False, True):
            row: dict[str, Any] = {"block": name, "compiled": compiled}
            try:
                losses, facts = block_losses(name, place.device, compiled=compiled)
                differences = [abs(a - b) for a, b in zip(losses, expected.get(name, []))]
                row |= {"losses": losses, "difference": max(differences) if differences else None, **facts}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
    return {"rows": rows}


def block_losses(name: str, device: str, *, compiled: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Losses before and after one step of a small fp32 model, and what was seen on the way."""
    import torch
    from torch._dynamo.utils import counters

    from polarlm.fast import backends
    from polarlm.model.build import build_model
    from polarlm.training.hardware import compile_seconds, compiled_loss
    from polarlm.training.optimisers import build_optimiser

    config = configuration(f"block={name}", *TINY)
    torch.manual_seed(1)
    model = build_model(config, VOCABULARY).to(device).train()
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1)).to(device)
    optimiser = build_optimiser(config["optim"], model)
    torch._dynamo.reset()  # its clock too
    counters.clear()
    backends.forget_choices()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # Without a GPU only the graph is captured: Inductor's C++ takes half a minute per block.
    loss = compiled_loss(model, backend="inductor" if device == "cuda" else "aot_eager")
    step = loss if compiled else model.loss
    first = step(tokens, tokens)
    first.backward()
    optimiser.step()
    losses = [float(first.detach()), float(step(tokens, tokens).detach())]
    made = backends.choices()
    facts: dict[str, Any] = {"backend": sorted({choice.backend for choice in made})}
    if why := sorted({reason for choice in made for reason in choice.reasons}):
        facts["not taken"] = why
    facts["graph_breaks"] = sum(counters["graph_break"].values())
    facts["compile_seconds"] = round(compile_seconds(), 2)
    if device == "cuda":
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
    return losses, facts


def kernels_stage(place: Bench) -> dict[str, Any]:
    """Milliseconds of attention forward and backward: polar's and a forget-gate baseline's against PyTorch's own."""
    import torch
    import torch.nn.functional as F

    from polarlm.attention.robust import DirectionalNoise, RobustCall, robust_attention

    batch, heads, size = (8, 12, 64) if place.gpu else (1, 2, 32)
    dtype = torch.bfloat16 if place.gpu else torch.float32
    values = {"mu": 0.01, "eta_k2": 0.05, "eta_q2": 0.05, "sigma02": 0.02, "m_inf2": 0.01, "nu": 3.0}
    rows = []
    for context in (512, 1024, 2048, 4096, 8192) if place.gpu else (64, 128):
        q, k, v = (
            torch.randn(batch, heads, context, size, device=place.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        m = (torch.rand(batch, context, device=place.device) + 0.5).requires_grad_()
        forgotten = -0.01 * torch.rand(batch, heads, context, device=place.device).cumsum(-1)
        forgotten.requires_grad_()
        noise = DirectionalNoise(
            **{n: torch.full((heads,), x, device=place.device, requires_grad=n != "nu") for n, x in values.items()}
        )
        polar = RobustCall(q, k, v, noise, "student", m, forgotten=forgotten)
        one, zero = torch.ones(heads, device=place.device), torch.zeros(heads, device=place.device)
        plain = DirectionalNoise(zero, zero, zero, one, zero, tau=one * 4 * size**-0.5)
        fox = RobustCall(q, k, v, plain, "exponential", residual_form="dot", forgotten=forgotten, constant=True)
        row: dict[str, Any] = {"context": context}
        for name, run in (
            ("sdpa", lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
            ("fox", lambda call=fox: robust_attention(call).v_bar),
            ("polar", lambda call=polar: robust_attention(call).v_bar),
        ):
            forward, both = measured_passes(run, place.device)
            row |= {f"{name}_forward_ms": 1000 * forward, f"{name}_backward_ms": 1000 * (both - forward)}
        total = {name: row[f"{name}_forward_ms"] + row[f"{name}_backward_ms"] for name in ("sdpa", "polar")}
        rows.append(row | {"ratio": total["polar"] / total["sdpa"]})
    return {"rows": rows}


def measured_passes(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of a forward pass, and of a forward and a backward pass."""
    import torch

    from polarlm.launch.doctor import timed

    with torch.no_grad():
        forward = timed(run, device, repeats=20)
    return forward, timed(lambda: run().float().sum().backward(), device, repeats=20)


def training_stage(place: Bench) -> dict[str, Any]:
    """Steady steps of three blocks at two sizes, on made-up tokens: tokens/s, MFU, planned and real memory."""
    import torch

    from polarlm.model.build import build_model
    from polarlm.training.batching import one_step
    from polarlm.training.hardware import (
        believable_share,
        compile_seconds,
        gpu_peak,
        measured_peak,
        use_tensor_cores,
    )

    use_tensor_cores()
    sizes: dict[str, list[str]] = {
        "19M": ["experiment=wikitext103_19m", "trainer.micro_batch_tokens=8192", "trainer=gpu"],
        "124M": [
            "experiment=gpt2_124m",
            "trainer.batch_tokens=32768",
            "trainer.micro_batch_tokens=8192",
            "trainer=gpu",
        ],
    }
    if not place.gpu:
        sizes = {"tiny": [*TINY, "trainer.batch_tokens=256", "trainer=cpu"]}
    steps = 200 if place.gpu else 4
    peak = gpu_peak(torch.cuda.get_device_name(), "bf16-mixed") if place.gpu else measured_peak()
    rows = []
    for size, overrides in sizes.items():
        vocabulary = 50257 if place.gpu else VOCABULARY
        for name in RACE:
            torch._dynamo.reset()
            config = configuration(f"block={name}", *overrides)
            step = one_step(config, vocabulary)
            if place.gpu:
                torch.cuda.reset_peak_memory_stats()
            began = compile_seconds()
            for _ in range(5 if place.gpu else 1):
                step()
            compiled, started = compile_seconds() - began, time.perf_counter()
            for _ in range(steps):
                step()
            speed = steps * config["trainer"]["batch_tokens"] / (time.perf_counter() - started)
            flops = build_model(config, vocabulary).flops_per_token(config["model"]["context"])
            row = {"size": size, "block": name, "tokens_per_second": speed, "compile_seconds": round(compiled, 1)}
            row["mfu"] = believable_share(speed * flops, peak)
            if place.gpu:
                row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "planned_bytes": planned_bytes(config)}
            rows.append(row)
    return {"steps": steps, "rows": rows}


def planned_bytes(config: dict[str, Any]) -> int:
    """What the plan of a run says that a GPU will hold."""
    from polarlm.training.gpus import PlanSettings
    from polarlm.training.plan import make_plan

    return make_plan(config, PlanSettings(gpus=1, gpu="h100", vocab=50257)).chosen.peak


def syncs_stage(place: Bench) -> dict[str, Any]:
    """Whether a step makes the processor wait for the GPU."""
    if not place.gpu:
        return {"n/a": "a CPU has nothing to wait for"}
    import torch

    from polarlm.model.build import build_model
    from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm

    rows = []
    for name, optim in ((name, optim) for name in RACE for optim in ("adamw", "muon")):
        config = configuration(f"block={name}", f"optim={optim}", *TINY)
        model = build_model(config, VOCABULARY).to("cuda").train()
        optimiser = build_optimiser(config["optim"], model)
        tokens = torch.zeros(4, 64, dtype=torch.long, device="cuda")
        problem = None
        for watched in (False, True):  # the first step compiles kernels and makes the optimiser's state
            torch.cuda.set_sync_debug_mode("error" if watched else "default")
            try:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    model.loss(tokens, tokens).backward()
                gradients = gradients_of(model.parameters())
                clip(gradients, total_norm(gradients), 1.0)
                optimiser.step()
                optimiser.zero_grad()
            except RuntimeError as error:
                problem = str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        rows.append({"block": name, "optim": optim, "sync": problem})
    return {"rows": rows}


def devices_stage(place: Bench) -> dict[str, Any]:
    """DDP and FSDP with two processes, killed after their first checkpoint and resumed by one process."""
    import torch

    if place.gpu and torch.cuda.device_count() < 2:
        return {"n/a": "one GPU"}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(
            "".join(f"{i * i % 97} times the river turned, and {i % 13} lamps were lit.\n\n" for i in range(200))
        )
        for strategy in ("ddp", "fsdp"):
            job = [
                f"block={RACE[-1]}", *TINY, f"data.path={text}", f"runs_dir={folder}/runs", f"cache_dir={folder}/cache",
                f"name={strategy}", "logger=none", "diagnostics=off", "trainer.max_steps=40",
                "trainer.batch_tokens=512", "trainer.checkpoint_every=5", "trainer.compile=false", "sample.tokens=5",
                f"trainer.accelerator={'gpu' if place.gpu else 'cpu'}",
            ]  # fmt: skip
            rows.append({"strategy": strategy, **killed_and_resumed(job, strategy, Path(folder) / "runs" / strategy)})
    return {"rows": rows}


def killed_and_resumed(job: list[str], strategy: str, folder: Path) -> dict[str, Any]:
    """Start a run of two processes, kill it after a checkpoint, resume it with one; its last step and loss."""
    train = [sys.executable, "-m", "polarlm", "train", *job]
    two = [*train, f"trainer.strategy={strategy}", "trainer.devices=2"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(two, start_new_session=True, **options)
    until = time.monotonic() + 600
    while process.poll() is None and not (folder / "checkpoints" / "last.ckpt").exists():
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    killed = process.poll() is None
    if killed:
        os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    if not (folder / "checkpoints" / "last.ckpt").exists():
        return {"error": said[-600:]}
    again = subprocess.run([*train, "trainer.strategy=auto", "trainer.devices=1"], **options)
    summary = read_json(folder / "summary.json") or {}
    if again.returncode:
        return {"error": again.stdout[-600:]}
    return {"killed": killed, "step": summary.get("step"), "val/loss": summary.get("val/loss")}


@dataclass(frozen=True)
class Stage:
    """A part of the acceptance, and after how many seconds it is given up."""

    run: Callable[[Bench], dict[str, Any]]
    limit: int


STAGES = {
    "environment": Stage(environment_stage, 600),
    "numerics": Stage(numerics_stage, 1800),
    "blocks": Stage(blocks_stage, 3600),
    "kernels": Stage(kernels_stage, 900),
    "training": Stage(training_stage, 3600),
    "syncs": Stage(syncs_stage, 900),
    "devices": Stage(devices_stage, 1800),
}


def configuration(*overrides: str) -> dict[str, Any]:
    """The checked configuration of a run, as train.py would make it."""
    from polarlm.launch.overrides import config_loader, plan_jobs

    job = plan_jobs(config_loader(), "train", ["diagnostics=off", "logger=none", *overrides], multirun=False).jobs[0]
    assert job.config is not None
    block = next(o.partition("=")[2] for o in overrides if o.startswith("block="))
    return {**job.config, "choices": {**job.config.get("choices", {}), "block": block}}


def all_blocks() -> list[str]:
    """The names of configs/block."""
    return sorted({path.stem for path in (CONFIGS / "block").glob("*.yaml")} | VARIANTS.keys())


# -- verdict and page --------------------------------------------------------------------------------------------------


def judge_stages(stages: dict[str, Any], place: Bench) -> list[dict[str, str]]:
    """One line per threshold: ok, n/a or FAILED."""
    verdict = []

    def say(what: str, good: bool | None, answer: str) -> None:
        verdict.append({"state": "n/a" if good is None else "ok" if good else "FAILED", "what": what, "answer": answer})

    for name, stage in stages.items():
        if "error" in stage:
            say(name, False, stage["error"].splitlines()[-1][:200] if stage["error"] else "no answer")
    rows = {name: stage.get("rows", []) for name, stage in stages.items()}
    for check in stages.get("environment", {}).get("doctor", []):
        if check["state"] == "FAILED":
            say(f"doctor: {check['what']}", False, check["answer"])
    if judged := [row for row in rows.get("numerics", []) if "error" in row]:
        wrong = [row for row in judged if not row["error"] <= row["allowed"]]
        said = "; ".join(f"{r['backend']} {r['variant']} {r['dtype']} {r['head']}: {r['error']:.1e}" for r in wrong[:5])
        say("numerics", not wrong, said or f"{len(judged)} comparisons with fp64 within their tolerance")
        unsteady = sorted({row["backend"] for row in judged if not row["repeatable"]})
        say("repeatable", not unsteady or place.gpu, f"not bit for bit: {', '.join(unsteady)}" if unsteady else "yes")
    for row in rows.get("blocks", []):
        mode = f"{row['block']} {'compiled' if row['compiled'] else 'eager'}"
        if "error" in row:
            say(mode, False, row["error"])
        elif row["difference"] is None or row["difference"] > LOSS_TOLERANCE:
            say(mode, False, f"losses {row['losses']}, {row['difference']} nats from the CPU's")
        elif row["graph_breaks"]:
            say(mode, False, f"{row['graph_breaks']} graph breaks")
        elif place.gpu and row["block"] in RACE and {"streaming", "reference"} & set(row["backend"]):
            say(mode, False, f"attention fell back to {', '.join(row['backend'])}")
    if rows.get("blocks"):
        worst = max((row.get("difference") or 0.0 for row in rows["blocks"]), default=0.0)
        say("blocks", True, f"{len(rows['blocks'])} steps, losses within {worst:.1e} nats of the CPU's where not named")
    if long := [row for row in rows.get("kernels", []) if row["context"] >= 2048]:
        slowest = max(row["ratio"] for row in long)
        say("kernel speed", slowest <= SLOWEST_KERNEL, f"{slowest:.1f} times SDPA (at most {SLOWEST_KERNEL})")
    elif "kernels" in stages:
        say("kernel speed", None, "measured only on a GPU")
    judge_training(rows.get("training", []), say)
    if synced := [row for row in rows.get("syncs", []) if row["sync"]]:
        say("syncs", False, "; ".join(f"{row['block']} {row['optim']}: {row['sync']}" for row in synced[:3]))
    elif "syncs" in stages:
        say("syncs", True if rows["syncs"] else None, stages["syncs"].get("n/a", "no step waits for the GPU"))
    for row in rows.get("devices", []):
        finished = "error" not in row and row["killed"] and row["step"] == 40
        say(f"two processes, {row['strategy']}", finished, row.get("error") or "killed, resumed by one, finished")
    if "n/a" in stages.get("devices", {}):
        say("two processes", None, stages["devices"]["n/a"])
    return verdict


def judge_training(rows: list[dict[str, Any]], say: Callable[[str, bool | None, str], None]) -> None:
    """MFU, polar against standard_strong, and memory against the plan, at the largest size."""
    large = {row["block"]: row for row in rows if row["size"] == "124M"}
    if not large:
        if rows:
            say("training speed", None, "judged only on a GPU")
        return
    strong, polar = large["standard_strong"], large["polar"]
    known = strong["mfu"] is not None
    say("MFU", strong["mfu"] >= LEAST_MFU if known else None, f"{strong['mfu']:.0%}" if known else "n/a: unknown card")
    ratio = strong["tokens_per_second"] / polar["tokens_per_second"]
    say("polar step", ratio <= SLOWEST_STEP, f"{ratio:.2f} times standard_strong (at most {SLOWEST_STEP})")
    over = max(row["peak_bytes"] / row["planned_bytes"] for row in large.values())
    say("memory", over <= MEMORY_FACTOR, f"{over:.2f} times the plan (at most {MEMORY_FACTOR})")


def page(report: dict[str, Any]) -> str:
    """The report as one page of Markdown."""
    failed = [check for check in report["verdict"] if check["state"] == "FAILED"]
    facts = report["stages"].get("environment", {}).get("environment", {})
    where = ", ".join(facts.get("gpus") or []) or f"no GPU ({report['device']})"
    title = "Rehearsal: nothing here is a measurement" if report["fake"] else "REFUSED" if failed else "Accepted"
    lines = [f"# {title}: {where}", "", *markdown_table(report["verdict"], ("state", "what", "answer"))]
    for name, stage in report["stages"].items():
        lines += ["", f"## {name} ({stage['seconds']} s)", ""]
        rows = stage.get("rows") or stage.get("doctor") or []
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += markdown_table(rows, columns) if rows else [str(stage.get("error") or stage.get("n/a") or "nothing")]
    return "\n".join(lines) + "\n"


def markdown_table(rows: list[dict[str, Any]], columns: Any) -> list[str]:
    """Rows as a table of Markdown."""

    def cell(value: Any) -> str:
        text = (
            f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, list) else str(value)
        )
        return text.replace("\n", " ").replace("|", "/")[:160]

    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (list(columns), ["---"] * len(columns), *cells)]
