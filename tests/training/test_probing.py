"""The probe around training: it sees everything and changes nothing."""

import json
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from polarlm.attention import PolarAttention
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.runs.files import json_lines
from polarlm.training.callbacks import Probing, Steps, probe_batch
from polarlm.training.module import LanguageModel
from polarlm.training.recorder import Recorder
from polarlm.training.schedules import Constant

TEXT = np.random.default_rng(0).integers(0, 32, 5000)
OPTIM = {"_target_": "polarlm.training.optimisers.adamw", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}
OPTIM |= {"weight_decay": 0.1, "estimator_lr_factor": 1.0, "grad_clip": None}


class Store:
    def __len__(self):
        return len(TEXT)

    def windows(self, begins, length):
        return np.stack([TEXT[b : b + length] for b in begins])

    def document_ids(self, begin, length):
        return (np.arange(begin, begin + length) // 10) - begin // 10


class Data(pl.LightningDataModule):
    context, mask_documents = 16, False
    corpus = SimpleNamespace(store=lambda split: Store())

    def train_dataloader(self):
        rows = torch.from_numpy(TEXT[: 32 * 17].reshape(32, 17))
        batches = [{"tokens": r[:, :-1], "targets": r[:, 1:], "counted": torch.tensor(32.0)} for r in rows.split(2)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def train(folder, *, every, steps=10, compiled=False, layers=2):
    """Train a tiny model with dropout; returns the rows of metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=32, context=16, d_model=16, n_layer=layers, n_head=2, dropout=0.2)
    module = LanguageModel(
        GPT(config, PolarAttention), optim=OPTIM, schedule=Constant(), seed=1, compiled=compiled,
    )  # fmt: skip
    recorder = Recorder(folder, batch_tokens=32, flops_per_token=1, log_every=1)
    probing = Probing(recorder, Data(), {"every": every, "tokens": 64, "length": 1024})
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=[recorder.logger], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=10**9,
        callbacks=[recorder, probing, Steps([probing, recorder])],
    )  # fmt: skip
    trainer.fit(module, datamodule=Data())
    return json_lines(folder / "metrics.jsonl")


def probes(folder):
    return [json.loads(line) for line in (folder / "diagnostics" / "probe.jsonl").read_text().splitlines()]


def losses(rows):
    return [row["train/loss"].hex() for row in rows]


def test_losses_are_bit_identical_with_and_without_diagnostics(tmp_path):
    with_probe, without = train(tmp_path / "on", every=2), train(tmp_path / "off", every=0)
    assert losses(with_probe) == losses(without)
    assert not (tmp_path / "off" / "diagnostics").exists()


@pytest.mark.slow
def test_compiled_losses_are_bit_identical_and_nothing_is_compiled_again(tmp_path):
    from torch._dynamo.utils import counters

    def compiled(name, every):
        """Losses of a run through torch.compile's default backend, the graphs it compiled, and the graph breaks."""
        torch._dynamo.reset()
        counters.clear()
        rows = train(tmp_path / name, every=every, compiled=True, layers=1)
        assert counters["inductor"]  # code was generated, not only traced
        return losses(rows), counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    without, with_probe = compiled("off", 0), compiled("on", 2)
    assert with_probe == without
    assert without[1:] == (1, {})  # the whole loss is one graph


def test_probes_come_at_the_start_every_so_often_and_at_the_end(tmp_path):
    rows = train(tmp_path, every=4)
    assert [probe["step"] for probe in probes(tmp_path)] == [0, 4, 8, 10]
    assert [probe["tokens"] for probe in probes(tmp_path)] == [0, 128, 256, 320]
    assert [row["step"] for row in rows if "radial/growth/layer_01" in row] == [4, 8, 10]
    last, probe = rows[-1], probes(tmp_path)[-1]
    assert last["precision/log_evidence/layer_01/head_1"] == probe["values"]["precision/log_evidence"][1][1]


def test_probing_is_kept_out_of_throughput(tmp_path):
    recorder = Recorder(tmp_path, batch_tokens=32, flops_per_token=1, log_every=1)
    probing = Probing(recorder, Data(), {"every": 1, "tokens": 64, "length": 16})
    plugin = SimpleNamespace(forward_context=torch.no_grad)
    strategy = SimpleNamespace(precision_plugin=plugin)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, loggers=[], strategy=strategy)
    module = SimpleNamespace(
        model=GPT(GPTConfig(vocab_size=32, context=16, d_model=16, n_layer=1, n_head=2), PolarAttention),
        device=torch.device("cpu"),
    )
    probing.on_train_start(trainer, module)
    assert recorder.paused > 0


def test_a_continued_run_forgets_the_probes_after_its_checkpoint(tmp_path):
    train(tmp_path, every=4)
    file = tmp_path / "diagnostics" / "probe.jsonl"
    file.write_text(file.read_text() + '{"step": 12, "tok')  # killed while writing
    recorder = Recorder(tmp_path, batch_tokens=32, flops_per_token=1, log_every=1)
    recorder.on_train_start(SimpleNamespace(global_step=4, loggers=[], max_steps=10), None)
    assert [probe["step"] for probe in probes(tmp_path)] == [0, 4]


def test_probe_text_is_fixed_and_spread_over_the_split():
    data = SimpleNamespace(corpus=Data.corpus, context=16, mask_documents=False)
    batch = probe_batch(data, tokens=64, length=1024)
    assert batch["tokens"].shape == (4, 16) and "documents" not in batch
    assert torch.equal(batch["tokens"], probe_batch(data, tokens=64, length=1024)["tokens"])
    assert batch["tokens"][-1].tolist() == TEXT[-16:].tolist()
    assert probe_batch(data, tokens=64, length=8)["tokens"].shape == (8, 8)


def test_documents_are_masked_in_the_probe_when_they_are_in_training():
    data = SimpleNamespace(corpus=Data.corpus, context=16, mask_documents=True)
    batch = probe_batch(data, tokens=32, length=16)
    assert batch["documents"][0].tolist() == [0] * 10 + [1] * 6


@pytest.mark.parametrize("options", [{"every": -1}, {"tokens": 0}, {"length": 1}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(UserError, match=r"diagnostics\.every"):
        Probing(None, None, {"every": 1, "tokens": 8, "length": 8} | options)
