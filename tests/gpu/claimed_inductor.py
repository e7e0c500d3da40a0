"""Inductor's code for the claimed H100 (claimed.py): generated, and neither compiled further nor launched."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.async_compile as async_compile
import torch._inductor.config as settings
import torch._inductor.fx_passes.fuse_attention as fuse_attention
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.pad_mm as pad_mm
import torch._inductor.graph as inductor_graph
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from triton.runtime import driver

from benchmarks.triton_aot import ClaimedGPU
from tests.gpu.claimed import GPU, H100


class Driver(ClaimedGPU):
    """What Inductor asks of Triton's driver."""

    def __init__(self) -> None:
        super().__init__(90)

    def get_active_torch_device(self) -> torch.device:
        return GPU

    def get_device_interface(self) -> Any:
        return torch.cuda

    utils = SimpleNamespace(
        get_device_properties=lambda device: dict(
            max_shared_mem=H100.shared_memory_per_block_optin, max_num_regs=H100.regs_per_multiprocessor,
            multiprocessor_count=H100.multi_processor_count, warpSize=32,
            sm_clock_rate=H100.clock_rate, mem_clock_rate=H100.memory_clock_rate, mem_bus_width=H100.memory_bus_width,
        )
    )  # fmt: skip


@contextlib.contextmanager
def inductor() -> Iterator[tuple[Any, list[str]]]:
    """(a backend for torch.compile, the code that it generates: a forward graph, then its backward).

    What a compiled function returns is computed from its graph, since fake tensors have shapes alone.
    """
    codes: list[str] = []

    def generate(graph: Any, inputs: Any, backward: bool) -> Any:
        compile_fx_inner(copy.deepcopy(graph), inputs, is_backward=backward, static_input_idxs=[])
        return make_boxed_func(graph)

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        joint = joint_graph.joint_graph_passes(joint, GPU)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: generate(graph, inputs, False),
        bw_compiler=lambda graph, inputs: generate(graph, inputs, True),
        decompositions=select_decomp_table,
        partition_fn=partition,
    )
    torch._dynamo.reset()
    with (
        settings.patch(joint_graph_constant_folding=False, compile_threads=1, force_disable_caches=True),
        patch.object(driver, "_active", Driver()),
        patch.object(interfaces.CudaInterface, "device", contextlib.nullcontext),
        patch.object(fuse_attention, "_sfdp_init", lambda *_: None),  # patterns that are traced with real tensors
        patch.object(pad_mm, "_pad_mm_init", lambda *_: None),
        patch.object(inductor_graph.GraphLowering, "save_output_code", staticmethod(codes.append)),
        patch.object(async_compile.AsyncCompile, "triton", lambda *_, **__: SimpleNamespace(run=None)),
    ):
        yield backend, codes


def launches(code: str) -> int:
    """How many kernels of Inductor's own and of libraries a generated graph launches; operators of ours count once."""
    return len(re.findall(r"\w+\.run\(|extern_kernels\.\w+\(| = torch\.ops\.[\w.]+\(", code[code.index("def call(") :]))
