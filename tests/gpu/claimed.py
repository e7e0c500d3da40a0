"""A GPU that is only claimed: fake tensors on cuda:0 with shapes and no numbers, in a process that says it has an H100.

`guard.cpp` changes a whole process and must be there before torch, so test_gpu_path.py starts one of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
SOURCE = Path(__file__).with_name("guard.cpp")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=85 * 10**9, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, clock_rate=1755000, memory_clock_rate=2619000, memory_bus_width=5120, gcnArchName="",
    is_integrated=0, uuid="0",
)  # fmt: skip


def compiler() -> str | None:
    """The C++ compiler that builds the guard, or None."""
    return shutil.which("g++") or shutil.which("clang++")


def build_guard() -> Path:
    """The compiled guard, built once for this source and this installation of torch into a folder of the user's own."""
    from torch.utils.cpp_extension import include_paths, library_paths

    installation = f"{torch.__version__} {torch.__file__}"  # the guard is linked to its libraries
    tag = hashlib.sha256(SOURCE.read_bytes() + installation.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"polarlm-claimed-gpu-{os.getuid()}" / f"{tag}.so"
    if not built.exists():
        built.parent.mkdir(mode=0o700, exist_ok=True)
        flags = [f"-I{path}" for path in include_paths()]
        for path in library_paths():
            flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
        beside = built.with_name(f"{tag}.{os.getpid()}")
        subprocess.run(
            [str(compiler()), "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), *flags, "-lc10", "-ltorch_cpu"]
            + ["-o", str(beside)],
            check=True,
        )
        beside.rename(built)
    return built


def claim() -> None:
    """Make this process believe in one H100. There is no way back."""
    import torch._dynamo.device_interface as interfaces
    import torch.cuda.amp.common as amp

    amp.amp_definitely_not_available = lambda: False
    claims: dict[str, Any] = dict(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        is_bf16_supported=lambda including_emulation=True: True, _lazy_init=lambda: None, set_device=lambda d: None,
        get_device_properties=lambda d=None: H100, get_device_capability=lambda d=None: (9, 0),
        get_device_name=lambda d=None: H100.name, synchronize=lambda d=None: None, _exchange_device=lambda d: 0,
        _maybe_exchange_device=lambda d: 0, get_rng_state=lambda d=None: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda s, d=None: None, default_generators=(torch.Generator(),),
        _get_device_properties=lambda d=None: H100,
    )  # fmt: skip
    for name, value in claims.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_getDevice = lambda: 0
    for of in (interfaces.CudaInterface, interfaces.CudaInterface.Worker):
        of.get_device_properties = staticmethod(lambda d=None: H100)
        of.current_device = staticmethod(lambda: 0)
    interfaces.CudaInterface.get_compute_capability = staticmethod(lambda d=None: 90)
    interfaces.CudaInterface.is_available = staticmethod(lambda: True)
    interfaces.CudaInterface.synchronize = staticmethod(lambda d=None: None)


def to_gpu(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model with fake parameters and buffers on the claimed GPU; shared ones stay shared."""
    made: dict[int, Any] = {}

    def claimed(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in made:
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            fake: torch.Tensor = FakeTensor(mode, empty, GPU)
            made[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
        return made[id(value)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: claimed(value) for name, value in held.items() if value is not None})
    return model


class Watch(TorchDispatchMode):
    """Counts the GPU's operators, and notes what makes the host wait for the GPU or copies from one to the other."""

    supports_higher_order_operators = True
    WAITS = ("_local_scalar_dense", "equal.default", "is_nonzero", "nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if any(wait in name for wait in self.WAITS):
            self.waits.append(name)
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        self.operators[name] += any(x.is_cuda for x in tensors)
        copies = "copy" in name  # elsewhere a number on the host is an argument of a launch
        if {x.device.type for x in tensors if copies or x.dim()} == {"cpu", "cuda"}:
            self.waits.append(f"{name} between host and GPU")
        return out
