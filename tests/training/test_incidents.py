"""A step that goes wrong is noticed, named, never saved, and handled as asked."""

import json
import threading

import lightning.pytorch as pl
import pytest
import torch

from polarlm.errors import UserError
from polarlm.runs.checkpoints import load_verified, step_files
from polarlm.runs.measurements import detours
from polarlm.training.incidents import Incidents, TrainingDiverged
from tests.training.tiny_jobs import fitted

OPTIONS = ("trainer.max_steps=12", "trainer.checkpoint_every=4", "trainer.log_every=5", "model.dropout=0.1")


@pytest.fixture(autouse=True)
def _no_peak(monkeypatch):
    monkeypatch.setattr("polarlm.training.hardware.measured_peak", lambda **_: 1e9)


class Poison(pl.Callback):
    """Makes a gradient of one step nan: in the embedding, when a given step is taken."""

    def __init__(self, step: int, times: int) -> None:
        self.step, self.times = step, times

    def on_after_backward(self, trainer, module) -> None:
        if trainer.global_step + 1 == self.step and self.times:
            self.times -= 1
            module.model.blocks[0].feed_forward.down.weight.grad[0, 0] = float("nan")


def incidents(folder) -> list[dict]:
    return json.loads((folder / "incidents.json").read_text())


def weights(folder) -> dict[str, torch.Tensor]:
    return load_verified(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_stop_names_the_step_and_keeps_only_good_checkpoints(tmp_path):
    with pytest.raises(TrainingDiverged, match="step 6"):
        fitted(tmp_path, tmp_path / "run", *OPTIONS, extra=(Poison(6, 1),))
    assert [p.name for p in step_files(tmp_path / "run/checkpoints")] == ["step_00000004.ckpt"]
    assert incidents(tmp_path / "run")[0]["action"] == "stop"
    # The same command goes on from there; this time nothing is poisoned.
    plain = fitted(tmp_path, tmp_path / "plain", *OPTIONS)
    again = fitted(tmp_path, tmp_path / "run", *OPTIONS)
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in plain]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_skip_leaves_out_one_update_and_nothing_else(tmp_path, optim):
    """The weights of the bad step stay as they were, bit for bit, and the optimiser does not count it."""
    seen = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen[trainer.global_step] = [p.detach().clone() for p in module.parameters()]

    options = (*OPTIONS, f"optim={optim}", "trainer.on_nonfinite=skip", "trainer.micro_batch_tokens=128")
    rows = fitted(tmp_path, tmp_path / "run", *options, extra=(Poison(6, 1), Look()))
    assert all(torch.equal(a, b) for a, b in zip(seen[5], seen[6]))
    assert not all(torch.equal(a, b) for a, b in zip(seen[6], seen[7]))
    assert rows[-1]["step"] == 12 and [i["action"] for i in incidents(tmp_path / "run")] == ["skip"]


def test_rewind_goes_back_and_on_with_other_batches_and_can_be_repeated_bit_for_bit(tmp_path):
    runs = {}
    for name in ("one", "two"):
        options = (*OPTIONS, "trainer.on_nonfinite=rewind", "trainer.micro_batch_tokens=128")
        rows = fitted(tmp_path, tmp_path / name, *options, extra=(Poison(6, 1),))
        assert [row["step"] for row in rows] == [1, 5, 10, 12]
        runs[name] = weights(tmp_path / name)
    records = incidents(tmp_path / "one")
    assert [(i["action"], i["after_step"], i["skipped_batches"]) for i in records] == [("rewind", 4, 4)]
    assert all(torch.equal(runs["one"][key], runs["two"][key]) for key in runs["one"])
    fitted(tmp_path, tmp_path / "plain", *OPTIONS, "trainer.micro_batch_tokens=128")
    plain = weights(tmp_path / "plain")
    assert not all(torch.equal(plain[key], runs["one"][key]) for key in plain)


def test_after_the_limit_the_run_stops(tmp_path):
    options = (*OPTIONS, "trainer.on_nonfinite=rewind", "trainer.max_incidents=0")
    with pytest.raises(TrainingDiverged, match="max_incidents=0"):
        fitted(tmp_path, tmp_path / "run", *options, extra=(Poison(6, 1),))


def test_a_step_that_always_goes_wrong_ends_the_run_after_the_allowed_rewinds(tmp_path):
    options = (*OPTIONS, "trainer.on_nonfinite=rewind", "trainer.max_incidents=2")
    with pytest.raises(TrainingDiverged, match="after 2 other incidents"):
        fitted(tmp_path, tmp_path / "run", *options, extra=(Poison(6, 10**9),))
    assert [(i["action"], i["after_step"], i["skipped_batches"]) for i in incidents(tmp_path / "run")] == [
        ("rewind", 4, 4),
        ("rewind", 4, 4),
    ]
    assert len(detours(tmp_path / "run")) == 2  # every one leaves out further batches


@pytest.mark.parametrize("seed", [20261118, 2**63 - 1])
def test_a_large_seed_trains(tmp_path, seed):
    rows = fitted(tmp_path, tmp_path / "run", "trainer.max_steps=2", "model.dropout=0.1", f"seed={seed}")
    assert rows[-1]["step"] == 2


def test_the_layer_where_it_started_is_named(tmp_path):
    class Break(pl.Callback):
        """From step 6 on, the second block's mixer gives nan: in the forward pass, so that repeating it shows it."""

        def on_train_batch_start(self, trainer, module, batch, index) -> None:
            if trainer.global_step == 5:
                module.model.blocks[1].mixer.out.weight.data[0, 0] = float("inf")

    with pytest.raises(TrainingDiverged, match=r"the output of blocks\.1\.mixer"):
        fitted(tmp_path, tmp_path / "run", *OPTIONS, extra=(Break(),))


def watcher(tmp_path, spike_z=10.0):
    nothing = lambda *_: None  # noqa: E731
    return Incidents(
        tmp_path, policy="stop", limit=1, spike_z=spike_z, is_read_step=nothing, discard=nothing, settle=nothing
    )


def test_a_jump_of_the_loss_is_found_and_noise_and_learning_are_not(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator) * 0.05
    curve = [5.0 * 0.99**i + 1.5 + float(noise[i]) for i in range(400)]
    watch = watcher(tmp_path)
    assert [watch.spike(loss) for loss in curve] == [None] * 400
    z = watch.spike(curve[-1] + 1.5)
    assert z is not None and z > 10
    assert watch.spike(curve[-1]) is None  # the jump itself does not move the median
    assert watcher(tmp_path, spike_z=0).spike(1e9) is None


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", "[{}]", '[{"action": "rewind"}]'])
def test_a_damaged_record_is_named_because_the_next_batches_follow_from_it(tmp_path, text):
    assert detours(tmp_path) == []
    (tmp_path / "incidents.json").write_text(text)
    with pytest.raises(UserError, match=r"incidents\.json is damaged"):
        detours(tmp_path)


def test_processes_that_found_different_things_take_the_same_passes():
    """A sharded model's passes are collective: a process that stopped alone would leave the others waiting for ever."""
    from polarlm.training.incidents import where_it_started

    ranks, meeting = 2, threading.Barrier(2, timeout=20)
    said: list[str | None] = [None] * ranks
    passes: list[list[str]] = [[] for _ in range(ranks)]
    named: list[str] = [""] * ranks

    class Toy(torch.nn.Module):
        """Bad in the forward pass of one process only; elsewhere its gradient is bad."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.layer = rank, torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.layer.weight, float("nan") if rank == 1 else 1.0)

        def loss(self, tokens, targets, documents=None):
            passes[self.rank].append("forward")
            loss = self.layer(tokens).sum()
            loss.register_hook(lambda _: passes[self.rank].append("backward"))
            return loss

    def process(rank: int) -> None:
        def agree(place):
            said[rank] = place
            meeting.wait()
            named_first = next((place for place in said if place is not None), None)
            meeting.wait()
            return named_first

        batches = [{"tokens": torch.ones(1, 1), "targets": torch.ones(1, 1)}] * 3
        named[rank] = where_it_started(Toy(rank), batches, torch.device("cpu"), agree)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passes[0] == passes[1] == ["forward"]
    assert named == ["the output of layer"] * 2
