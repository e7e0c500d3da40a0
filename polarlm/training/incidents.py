"""Steps that went wrong: a gradient that is not finite, a loss that jumped; noticed without waiting for the device.

After every backward pass the module leaves the gradients' norm on the device. `Incidents` keeps a flag there: from the
first norm that is not finite on, updates are suppressed (fused AdamW does that on the device itself). The flag is read
when a row is logged and before a checkpoint is written, so that no such state is ever saved, and the weights are then
still the ones of the step where it happened: that step is repeated with a look at every layer.

    stop      end the run with the step and the layer; its checkpoints stay usable
    skip      leave out that one update and go on
    rewind    go back to the last checkpoint and go on with other batches; also undoes a jump of the loss
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarlm.errors import UserError
from polarlm.runs.checkpoints import step_files
from polarlm.runs.files import write_json
from polarlm.runs.measurements import FILE, read_incidents

WINDOW = 100  # steps that a loss is compared with
FEWEST = 30  # of them, before anything is called a jump
SMALLEST_SPREAD = 0.02  # nats: a very smooth curve does not make every wiggle a jump


class TrainingDiverged(UserError):
    """Training diverged and the run cannot continue without the user."""


class Incidents(pl.Callback):
    """Watches every step, decides what to do about a bad one, and keeps the record (incidents.json)."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: str,
        limit: int,
        spike_z: float,
        is_read_step: Callable[[pl.Trainer], bool],
        discard: Callable[[], None],
        settle: Callable[[pl.Trainer], None],
    ) -> None:
        self.file, self.policy, self.limit, self.spike_z = folder / FILE, policy, limit, spike_z
        self.checkpoints = folder / "checkpoints"
        self.is_read_step, self.discard, self.settle = is_read_step, discard, settle
        self.rewound = False  # this fit ended to go back: fit again
        self.first_bad: Tensor | None = None  # on the device: the first step whose gradient was not finite, else −1
        self._losses: list[Tensor] = []  # of the steps since the last reading, on the device
        self._recent: deque[float] = deque(maxlen=WINDOW)

    # -- on the device -------------------------------------------------------------------------------------------------

    def suppress(self, norm: Tensor, step: int, optimiser: Any) -> None:
        """Note a norm that is not finite and keep the optimiser from using it; called between backward and step."""
        if self.first_bad is None:
            self.first_bad = torch.full((), -1, dtype=torch.int64, device=norm.device)
        bad = ~torch.isfinite(norm)
        self.first_bad = torch.where(bad & (self.first_bad < 0), step, self.first_bad)
        stop = bad if self.policy == "skip" else self.first_bad >= 0
        if hasattr(optimiser, "suppress"):
            optimiser.suppress(stop)
        elif optimiser.defaults.get("fused"):
            optimiser.found_inf = stop.to(torch.float32)
        # Otherwise a gradient scaler (16-mixed) does the same with its own flag.

    # -- after a step --------------------------------------------------------------------------------------------------

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> bool | None:
        """Read the flags when it is time; True when this step must not be kept."""
        self._losses.append(module.step_loss / trainer.accumulate_grad_batches)
        if not self.is_read_step(trainer):
            return None
        losses = trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean").tolist()
        first, self._losses = trainer.global_step - len(losses) + 1, []
        bad = int(self.first_bad) if self.first_bad is not None else -1
        if bad >= 0:
            self.first_bad = None
            layer = self._look(trainer, module, bad)
            what = f"The gradients of step {bad} are not finite (first in {layer})"
            return self._act(trainer, {"kind": "non-finite", "step": bad, "layer": layer}, what)
        for step, loss in enumerate(losses, first):
            z = self.spike(loss)
            if z is not None:
                what = f"The loss jumped to {loss:.3f} at step {step} ({z:.0f} robust deviations above its median)"
                incident = {"kind": "spike", "step": step, "loss": loss, "z": round(z, 1)}
                if self.policy == "rewind":
                    return self._act(trainer, incident, what)
                self._print(trainer, what)
                self._record(trainer, {**incident, "action": "reported"})
        return None

    def spike(self, loss: float) -> float | None:
        """The robust z-score of a loss that is a jump, None for an ordinary one; the loss joins the comparison."""
        z = None
        if self.spike_z and len(self._recent) >= FEWEST:
            middle = statistics.median(self._recent)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in self._recent)
            score = (loss - middle) / max(spread, SMALLEST_SPREAD)
            z = score if score > self.spike_z else None
        if z is None:
            self._recent.append(loss)
        return z

    def _act(self, trainer: pl.Trainer, incident: dict[str, Any], what: str) -> bool | None:
        # A skipped step that comes again is the same incident, trained again after a kill. After a rewind the batches
        # are others, so whatever happens then is a further one.
        past = [
            i
            for i in self.incidents()
            if i["action"] == "rewind" or (i["action"] == "skip" and i["step"] != incident["step"])
        ]
        if self.policy != "stop" and len(past) >= self.limit:
            raise TrainingDiverged(
                f"{what}, after {len(past)} other incidents (trainer.max_incidents={self.limit}); "
                "lower optim.lr, or look at the data of these steps (incidents.json)"
            )
        if self.policy == "stop":
            self._record(trainer, {**incident, "action": "stop"})
            raise TrainingDiverged(
                f"{what}; lower optim.lr, or continue with trainer.on_nonfinite=skip or rewind from the last checkpoint"
            )
        if self.policy == "skip":
            self._print(trainer, f"{what}: this update is left out")
            self._record(trainer, {**incident, "action": "skip"})
            return None
        self.settle(trainer)  # a checkpoint that is being verified is one to go back to
        trainer.strategy.barrier()
        back = max((int(p.stem.rpartition("_")[2]) for p in step_files(self.checkpoints)), default=0)
        skipped = trainer.global_step - back
        self._print(trainer, f"{what}: back to step {back}, its next {skipped} batches are left out")
        self._record(trainer, {**incident, "action": "rewind", "after_step": back, "skipped_batches": skipped})
        self.rewound = True
        self.discard()
        trainer.should_stop = True
        return True

    def _look(self, trainer: pl.Trainer, module: Any, step: int) -> str:
        """Repeat the step that went wrong, from its batches, and name the first layer that was not finite."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        with trainer.strategy.precision_plugin.forward_context():
            batches = data.batches_of_step(step - 1, trainer.global_rank, trainer.world_size)
            return where_it_started(module.model, batches, module.device, first_of_all_processes)

    # -- the record ----------------------------------------------------------------------------------------------------

    def incidents(self) -> list[dict[str, Any]]:
        """What happened so far, earlier processes included."""
        return read_incidents(self.file.parent)

    def _record(self, trainer: pl.Trainer, incident: dict[str, Any]) -> None:
        trainer.strategy.barrier()  # every process has read the record
        if trainer.is_global_zero:
            same = (incident["step"], incident["kind"])
            kept = [i for i in self.incidents() if i["action"] == "rewind" or (i["step"], i["kind"]) != same]
            write_json(self.file, [*kept, incident])
        trainer.strategy.barrier()

    def _print(self, trainer: pl.Trainer, text: str) -> None:
        if trainer.is_global_zero:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recent = deque(state_dict["recent"], maxlen=WINDOW)


def first_of_all_processes(place: str | None) -> str | None:
    """What the first process that found a place found; the same answer on every process."""
    if not dist.is_available() or not dist.is_initialized():
        return place
    places: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return next((named for named in places if named is not None), None)


def where_it_started(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    agree: Callable[[str | None], str | None] = lambda place: place,
) -> str:
    """The first module, in the order of the computation, whose output or gradient is not finite.

    The passes of a sharded model talk to the other processes, so all of them must take the same ones: `agree` gives
    every process the same answer before each decision.
    """
    training = model.training
    places: list[str] = []
    names = {module: name for name, module in model.named_modules() if name.count(".") <= 2 and name}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if not places and isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            places.append(f"the output of {names[module]}")

    hooks = [module.register_forward_hook(look) for module in names]
    model.zero_grad(set_to_none=True)
    try:
        for batch in batches:
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model.loss(moved["tokens"], moved["targets"], documents=moved.get("documents"))  # type: ignore[operator]
            if (origin := agree(places[0] if places else None)) is None:
                loss.backward()
                # Backwards, the last block comes first: a bad gradient spreads from there to the ones before it.
                bad = [n for n, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
                origin = agree(f"the gradient of {bad[-1]}" if bad else None)
            if origin is not None:
                return origin
        return "no layer when repeated: the state or the random numbers differ"
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        model.train(training)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.to_local() if hasattr(tensor, "to_local") else tensor).all())
