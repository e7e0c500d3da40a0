"""FSDP2 whose processes write and read their own rows of a checkpoint (runs/shards.py); none holds the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor, Shard

from polarlm.data.atomic import flush_folder
from polarlm.errors import UserError
from polarlm.runs.checkpoints import (
    SafeCheckpointIO,
    call_last,
    copied_to_cpu,
    load_head,
    newest_usable,
    remove_unused_shards,
    write_checkpoint,
)
from polarlm.runs.shards import MARK, PARTS, Shards, new_folder, remove_folder, take_apart, write_rows
from polarlm.runs.tensor_files import DamagedCheckpoint


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 with our checkpoints."""

    def __init__(self, processes: int) -> None:
        super().__init__(data_parallel_size=processes, tensor_parallel_size=1)
        self._saving: tuple[Path, Path, dict[str, Any]]  # what finish_saving completes

    # -- writing -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as this process has them; the parameters themselves, so that tied ones are seen to be one."""
        assert self.model is not None
        return self.model.state_dict(keep_vars=True)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimiser's state as this process has it."""
        return (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Every process begins to write its rows, in the background: `finish_saving` makes them a checkpoint."""
        path, folder = Path(filepath), None
        if self.is_global_zero:
            remove_unused_shards(path.parent)
            folder = new_folder(path.parent, path.stem)
        folder = Path(self.broadcast(str(folder)))
        head, rows = take_apart(checkpoint, rows_of)
        self._saving = path, folder, copied_to_cpu(head) if self.is_global_zero else {}
        self._io.begin(write_rows, folder, self.global_rank, rows)

    @property
    def _io(self) -> SafeCheckpointIO:
        assert isinstance(self.checkpoint_io, SafeCheckpointIO)
        return self.checkpoint_io

    def all_wrote(self) -> bool:
        """Whether every process has written its rows; all must ask."""
        return all(self._from_all(self._io.done))

    def finish_saving(self) -> None:
        """Wait until every process has written and verified its rows; then the first one writes the small .ckpt."""
        path, folder, head = self._saving
        checksums, problem = {}, None
        try:
            checksums = self._io.wait()
        except (FloatingPointError, OSError, UserError) as error:
            problem = error
        everyone = self._from_all((checksums, None if problem is None else str(problem)))
        problems = [f"process {number}: {text}" for number, (_, text) in enumerate(everyone) if text]
        if problems:
            if self.is_global_zero:
                remove_folder(folder)
            raise problem or UserError(problems[0])
        if self.is_global_zero:
            for place in (folder, folder.parent, path.parent):
                flush_folder(place)
            described = {part: [sums[part] for sums, _ in everyone] for part in PARTS.values()}
            write_checkpoint({**head, "shards": {"folder": folder.name, **described}}, path)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Go on from the newest checkpoint beside this one that all processes together found right.

        It may be sharded, by any number of processes, or whole: each process takes its rows.
        """
        path = newest_usable(Path(checkpoint_path).parent, self._verify_together, warn=self.is_global_zero)
        assert path is not None and self.model is not None
        if self.is_global_zero:
            call_last(path)
        head = load_head(path, mmap=True)
        source = CheckpointRows(path, head)
        source.load_weights(self.model, head.pop("state_dict"))
        for optimiser, state in zip(self.optimizers, head.pop("optimizer_states"), strict=True):
            source.load_optimiser(optimiser, state)
        return head

    def _verify_together(self, path: Path) -> None:
        """Each process verifies its part of the shards; a whole file is left to the first."""
        problem = None
        try:
            head = load_head(path, mmap=True) if self.is_global_zero else {}
            shards = Shards(path, head) if "shards" in head else None
        except DamagedCheckpoint as error:
            problem, shards = str(error), None
        count = self.broadcast(shards.processes if shards else 0)
        if count:
            try:
                shards = shards or Shards(path, load_head(path))
                shards.verify(processes=range(self.global_rank, count, self.world_size))
            except DamagedCheckpoint as error:
                problem = str(error)
        problems = [text for text in self._from_all(problem) if text]
        if problems:
            raise DamagedCheckpoint(problems[0])

    def _from_all(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """This process's rows of a sharded tensor, None for one that every process holds."""
    if not isinstance(tensor, DTensor):
        return None
    assert all(isinstance(p, Shard) and p.dim == 0 for p in tensor.placements), tensor.placements
    return tensor.to_local()


def span_of(tensor: DTensor) -> tuple[int, int]:
    """Which rows of the whole this process has: torch cuts equal pieces, of which the last may be smaller or empty."""
    piece = -(-tensor.shape[0] // tensor.device_mesh.size())
    begin = min(piece * tensor.device_mesh.get_local_rank(), tensor.shape[0])
    return begin, begin + tensor.to_local().shape[0]


class CheckpointRows:
    """Rows of the tensors of a checkpoint, whole or sharded."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.shards = path, Shards(path, head) if "shards" in head else None

    def rows(self, stored: Any, part: str, like: DTensor) -> torch.Tensor:
        """This process's rows of a stored tensor, cut as `like` is."""
        begin, end = span_of(like)
        if self.shards is not None and isinstance(stored, dict):
            return self.shards.rows(part, stored[MARK], begin, end)
        return stored[begin:end].clone()  # of a mapped file

    @torch.no_grad()
    def load_weights(self, module: torch.nn.Module, stored: dict[str, Any]) -> None:
        """Copy the stored weights into the module's own."""
        weights = module.state_dict(keep_vars=True)
        if weights.keys() != stored.keys():
            wrong = sorted(weights.keys() ^ stored.keys())
            raise UserError(f"{self.path} does not fit the model: {', '.join(wrong[:5])} in only one of them")
        for name, tensor in weights.items():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(self.rows(stored[name], PARTS["state_dict"], tensor))
            else:
                tensor.copy_(stored[name])

    def load_optimiser(self, optimiser: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
        """Give the optimiser its stored state, cut as its parameters are."""
        numbers = [number for group in stored["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        state = {
            number: {name: self._cut(value, parameter) for name, value in stored["state"][number].items()}
            for number, parameter in zip(numbers, parameters, strict=True)
            if number in stored["state"]
        }
        optimiser.load_state_dict({"state": state, "param_groups": stored["param_groups"]})

    def _cut(self, value: Any, parameter: torch.Tensor) -> Any:
        """A value of a parameter's state: its rows, sharded as the parameter is, or what all processes have."""
        of_rows = isinstance(value, dict) or (isinstance(value, torch.Tensor) and value.shape == parameter.shape)
        if of_rows and isinstance(parameter, DTensor):
            rows = self.rows(value, PARTS["optimizer_states"], parameter).to(parameter.device)
            mesh, placements = parameter.device_mesh, parameter.placements
            return DTensor.from_local(
                rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        return value.clone() if isinstance(value, torch.Tensor) else value
