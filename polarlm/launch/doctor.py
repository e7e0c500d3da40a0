"""`polarlm doctor`: what this machine can do, and whether every attention backend agrees with the reference."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Check = tuple[str, str, str]  # ok | n/a | warning | FAILED, what, what was found


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
        ("python", installed_versions), ("device", device), ("matrix products", precisions), ("C++ kernels", native),
        ("torch.compile", compiler), ("attention", backends), ("disk", disk),
    ]  # fmt: skip
    if not offline:
        parts.append(("network", services))
    for name, part in parts:
        try:
            yield from part()
        except Exception as error:
            yield "FAILED", name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def installed_versions() -> Iterator[Check]:
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
    if torch.backends.mps.is_available():
        yield "ok", "mps", "Apple GPU; attention runs in plain torch there"
    if not torch.cuda.is_available():
        capability = torch.backends.cpu.get_cpu_capability()
        yield "ok", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}; no CUDA GPU seen"


def precisions() -> Iterator[Check]:
    """The speed of a matrix product in each number format, and what trainer.precision=auto makes of it."""
    import torch

    from polarlm.training.hardware import SIZE, choose_accelerator, choose_precision, cpu_speed

    where = choose_accelerator("auto")
    if where == "cpu":  # the very numbers that trainer.precision=auto decides by: a second measurement would differ
        speed = cpu_speed()
        for name, flops in (("float32", speed.fp32), ("bfloat16", speed.bf16)):
            yield "ok", name, f"{flops / 1e9:,.3g} GFLOP/s ({SIZE} × {SIZE}, {torch.get_num_threads()} threads)"
    size = 4096 if where == "cuda" else 256
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if where != "cpu" else ():
        name = str(dtype).removeprefix("torch.")
        a = torch.randn(size, size, device=where).to(dtype)
        try:
            seconds = timed(lambda a=a: a @ a, where)  # type: ignore[misc]
        except RuntimeError as error:
            yield "n/a", name, f"not available here ({str(error).splitlines()[0]})"
            continue
        yield "ok", name, f"{2 * size**3 / seconds / 1e9:,.3g} GFLOP/s ({size} × {size})"
    choice = choose_precision("auto", where)
    yield "ok", "trainer.precision=auto", f"{choice.value}: {choice.why}"


def native() -> Iterator[Check]:
    """Whether the C++ kernels can be compiled, or lie ready."""
    import torch

    if not has_kernels():
        yield "n/a", "C++ kernels", "this installation has no polarlm/fast; everything runs in plain torch"
        return
    from polarlm.fast.native_backend import unbuilt

    began = time.perf_counter()
    reason = unbuilt(torch.float32)
    if reason is None:
        yield "ok", "C++ kernels", f"ready after {time.perf_counter() - began:.1f} s"
    else:
        yield "warning", "C++ kernels", f"{reason}; attention on a CPU runs in plain torch, several times slower"


def has_kernels() -> bool:
    """Whether polarlm/fast is installed; nothing but speed depends on it."""
    return importlib.util.find_spec("polarlm.fast") is not None


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
    if not has_kernels():
        return
    from polarlm.fast.backends import BACKENDS
    from polarlm.fast.selfcheck import check, passes, small_call
    from polarlm.training.hardware import choose_accelerator

    where = choose_accelerator("auto")
    for name, backend in BACKENDS.items():
        obstacle = backend.obstacle(small_call(where))
        if obstacle:
            yield "n/a", f"attention: {name}", f"not here: {obstacle}"
            continue
        compared = check(backend.run, BACKENDS["reference"].run, where)
        if compared.reason is not None:
            yield "FAILED", f"attention: {name}", compared.reason
            continue
        seconds = timed(lambda run=backend.run: passes(run, where), where, repeats=3)  # type: ignore[misc]
        text = f"error {compared.error:.0e}, {1000 * seconds:.1f} ms forward and backward"
        yield "ok", f"attention: {name}", text


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
