"""One rank of many in this process: the buffers are real, the others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from polarlm.model import GPT
from polarlm.training.module import LanguageModel


@contextlib.contextmanager
def rank_zero(world: int, model: GPT, optim: dict[str, Any]) -> Iterator[LanguageModel]:
    """The model's FSDP2 shards as rank 0 of `world` has them; its process group talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        module = LanguageModel(model, optim=optim)
        names = ("data_parallel", "tensor_parallel")
        module._device_mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=names)
        module.configure_model()
        yield module
    finally:
        dist.destroy_process_group()
