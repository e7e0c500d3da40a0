"""`polarlm doctor`: what this machine can do, and whether every attention backend agrees with the reference."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Check = tuple[str, str, str]  # ok | warning | FAILED, what, what was found
TOLERANCE = 1e-4  # largest difference of a backend from the reference, relative to the reference's largest number


def add_parser(verbs: Any) -> None:
    """Add `polarlm doctor`."""
    parser = verbs.add_parser(
        "doctor", help="check this machine: device, precisions, compiler, attention backends, services, disk"
    )
    parser.add_argument("--offline", action="store_true", help="leave out wandb and the hub")
    parser.set_defaults(run=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print one table; exit code 1 when something that training needs is broken."""
    failed = 0
    for state, what, answer in checks(offline=options.offline):
        failed += state == "FAILED"
        print(f"{state:8} {what:24} {answer}", flush=True)
    print(f"{failed} broken" if failed else "Everything that training needs works.")
    return 1 if failed else 0


def checks(*, offline: bool) -> Iterator[Check]:
    """Every check, one after the other; a check that raises is a failed one, never a traceback."""
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", versions), ("device", device), ("matrix products", precisions), ("torch.compile", compiler),
        ("attention", backends), ("disk", disk),
    ]  # fmt: skip
    if not offline:
        parts.append(("network", services))
    for name, part in parts:
        try:
            yield from part()
        except Exception as error:
            yield "FAILED", name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def versions() -> Iterator[Check]:
    """Python, torch and Lightning."""
    import lightning
    import torch

    import polarlm

    yield "ok", "polarlm", f"{polarlm.__version__}, Python {platform.python_version()}, {platform.system()}"
    yield "ok", "torch, lightning", f"{torch.__version__}, {lightning.__version__}"


def device() -> Iterator[Check]:
    """GPUs, else cores."""
    import torch

    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 1e9
        yield "ok", f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GB"
    if not torch.cuda.is_available():
        capability = torch.backends.cpu.get_cpu_capability()
        yield "ok", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}; no GPU seen"


def precisions() -> Iterator[Check]:
    """The speed of a matrix product in each number format."""
    import torch

    where = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if where == "cuda" else 512
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        a = torch.randn(size, size, device=where).to(dtype)
        try:
            seconds = timed(lambda a=a: a @ a, where)  # type: ignore[misc]
        except RuntimeError as error:
            yield "warning", name, f"not available here ({str(error).splitlines()[0]})"
            continue
        yield "ok", name, f"{2 * size**3 / seconds / 1e9:,.3g} GFLOP/s ({size} × {size})"


def compiler() -> Iterator[Check]:
    """Whether torch.compile can build code here."""
    import torch

    began = time.perf_counter()
    try:
        compiled = torch.compile(lambda x: (x.sin() + 1).sum())
        x = torch.linspace(0, 1, 64)
        error = abs(compiled(x).item() - (x.sin() + 1).sum().item())
    except Exception as problem:  # no C++ compiler: training works, compiled training does not
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        yield "warning", "torch.compile", f"does not work here: {reason}; use trainer.compile=false"
        return
    state = "ok" if error < 1e-4 else "FAILED"
    yield state, "torch.compile", f"error {error:.0e}, first compilation {time.perf_counter() - began:.1f} s"


def backends() -> Iterator[Check]:
    """Every attention backend against the reference: largest difference of outputs and gradients, and time."""
    import torch

    from polarlm.attention.kernels import BACKENDS, DirectionalNoise, RobustCall, robust_attention

    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    heads, length, size = 4, 128, 32
    q, k, v = (torch.randn(2, heads, length, size, generator=generator).to(where).requires_grad_() for _ in range(3))
    ones = torch.ones(heads, device=where)
    noise = DirectionalNoise(0.01 * ones, 0.5 * ones, 0.5 * ones, 0.2 * ones, 0.01 * ones, nu=4 * ones)
    magnitude = torch.rand(2, length, generator=generator).to(where) + 0.5
    call = RobustCall(q, k, v, noise, "student", magnitude=magnitude)

    def pass_through(name: str) -> list[Any]:
        output = robust_attention(call, name).v_bar
        return [output.detach(), *torch.autograd.grad(output.square().sum(), (q, k, v))]

    exact = pass_through("reference")
    for name, backend in BACKENDS.items():
        obstacle = backend.obstacle(call)
        if obstacle:
            yield "warning", f"attention: {name}", f"not here: {obstacle}"
            continue
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(pass_through(name), exact))
        seconds = timed(lambda name=name: pass_through(name), where, repeats=2)  # type: ignore[misc]
        state = "ok" if error < TOLERANCE else "FAILED"
        yield state, f"attention: {name}", f"error {error:.0e}, {1000 * seconds:.1f} ms forward and backward"


def disk() -> Iterator[Check]:
    """Free space where runs and caches go."""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield ("ok" if free > 2 else "warning"), "disk", f"{free:.0f} GB free in {Path.cwd()}"


def services() -> Iterator[Check]:
    """Whether wandb and the Hugging Face hub answer; training works without them."""
    for name, host in (("wandb", "api.wandb.ai"), ("hub", "huggingface.co")):
        try:
            socket.create_connection((host, 443), timeout=3).close()
            yield "ok", name, f"{host} answers"
        except OSError as error:
            yield "warning", name, f"{host} does not answer ({error}); runs are logged offline, corpora come from disk"


def timed(function: Callable[[], Any], where: str, repeats: int = 5) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    import torch

    best = float("inf")
    for _ in range(repeats + 1):
        began = time.perf_counter()
        function()
        if where == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
