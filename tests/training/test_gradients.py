"""What happens to gradients between the backward pass and the step."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from polarlm.attention import StandardAttention
from polarlm.model import GPT, GPTConfig
from polarlm.training.loop import quiet_libraries
from polarlm.training.module import LanguageModel
from polarlm.training.optimisers import clip, total_norm
from polarlm.training.schedules import Constant
from tests.training.tiny_jobs import fitted

OPTIM = dict(
    _target_="polarlm.training.optimisers.adamw",
    lr=1e-2,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.1,
    estimator_lr_factor=0.5,
)
VOCABULARY, CONTEXT = 11, 8


def module(grad_clip=1.0, steps=3, **optim):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, d_model=16, n_layer=1, n_head=2)
    return LanguageModel(
        GPT(config, StandardAttention),
        optim={**OPTIM, "grad_clip": grad_clip, **optim},
        schedule=Constant(warmup_fraction=0.0),
    )


def sequences(rows, counted=None, seed=1):
    """Random text; `counted[i]` targets of row i count."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    targets = text[:, 1:].clone()
    for row, count in enumerate(counted or []):
        targets[row, count:] = -100
    return text[:, :-1], targets


def micro_batches(tokens, targets, size, steps=1):
    """Cut into micro-batches that know how many targets of their step count, as the data module's do."""
    counted = (targets != -100).sum().float() / (len(tokens) // size // steps) / steps
    return [{"tokens": a, "targets": b, "counted": counted} for a, b in zip(tokens.split(size), targets.split(size))]


def fit(lm, batches, accumulate=1, steps=1, plugins=None, callbacks=()):
    quiet_libraries()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulate, logger=False, plugins=plugins,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(lm, torch.utils.data.DataLoader(batches, batch_size=None))
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


def test_clipping_limits_the_total_norm_and_leaves_small_gradients_alone():
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    norm = total_norm(gradients)
    assert norm == 5.0
    clip(gradients, norm, 10.0)
    assert torch.equal(gradients[0], torch.tensor([3.0, 0.0]))
    clip(gradients, norm, 1.0)
    assert total_norm(gradients).item() == pytest.approx(1.0, rel=1e-5)


class Seen(pl.Callback):
    """The norm of the gradients that the optimiser gets."""

    def __init__(self):
        self.norms = []

    def on_fit_start(self, trainer, lm):
        original = lm.configure_gradient_clipping

        def watched(optimizer, *arguments, **options):
            original(optimizer, *arguments, **options)
            self.norms.append(float(total_norm([p.grad for g in optimizer.param_groups for p in g["params"]])))

        lm.configure_gradient_clipping = watched


def test_the_step_is_taken_with_clipped_gradients_and_clipping_can_be_switched_off():
    norms = {}
    for limit in (1e-3, None):
        seen, lm = Seen(), module(limit)
        fit(lm, micro_batches(*sequences(8), 8), callbacks=[seen])
        norms[limit] = seen.norms[0]
        assert float(lm.grad_norm) > 0.01  # what is logged is the norm before clipping
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert norms[None] == pytest.approx(float(lm.grad_norm), rel=1e-6)


def test_the_gradient_scaler_of_16_bit_training_does_not_change_where_clipping_begins():
    """A CPU has no 16-bit autocast in Lightning, but the scaler's path is the same code as on a GPU."""
    plain = fit(module(0.01), micro_batches(*sequences(8), 4), accumulate=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    lm = module(0.01)
    scaled = fit(lm, micro_batches(*sequences(8), 4), accumulate=2, plugins=[HalfOnCpu(scaler)])
    assert float(lm.grad_norm) < 100  # unscaled: not a thousand times too large
    for name in plain:
        assert torch.allclose(plain[name], scaled[name], atol=1e-6), name


class HalfOnCpu(MixedPrecision):
    def __init__(self, scaler):
        super().__init__("16-mixed", "cpu", scaler)

    def autocast_context_manager(self):
        return nullcontext()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_micro_batch_size_does_not_change_the_step_when_counts_differ(size):
    text = sequences(8, counted=[8, 1, 8, 3, 2, 8, 1, 1])
    whole = fit(module(), micro_batches(*text, 8))
    lm = module()
    parts = fit(lm, micro_batches(*text, size), accumulate=8 // size)
    for name in whole:
        assert torch.allclose(whole[name], parts[name], atol=1e-6), name
    direct = module().model.loss(*text).detach()
    assert float(lm.step_loss) / (8 // size) == pytest.approx(float(direct), abs=1e-6)


def test_the_logged_loss_is_the_mean_over_the_steps_micro_batches(tmp_path):
    """One step of eight sequences: the first row's loss is the untrained model's, however the step is cut."""
    whole, parts = (
        fitted(tmp_path, tmp_path / cut, "trainer.max_steps=1", f"trainer.micro_batch_tokens={cut}")[0]["train/loss"]
        for cut in ("128", "16")
    )
    assert parts == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("packing", ["aligned", "stream"])
def test_packed_and_masked_text_trains_the_same_whatever_the_micro_batch(tmp_path, packing):
    options = (f"data.packing={packing}", "data.mask_documents=true", "data.document_separator='\n\n'")
    runs = [
        fitted(tmp_path, tmp_path / cut, *options, f"trainer.micro_batch_tokens={cut}") for cut in ("128", "32", "16")
    ]
    losses = [[row["train/loss"] for row in rows] for rows in runs]
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and losses[2] == pytest.approx(losses[0], abs=2e-5)


def test_the_rate_of_a_row_is_the_one_its_step_was_taken_with(tmp_path):
    """Of the matrices, that is: an estimator's scalars have half of it."""
    schedule = ("schedule=wsd", "schedule.warmup_fraction=0.5", "schedule.decay_fraction=0.5", "optim.lr=0.01")
    rows = fitted(tmp_path, tmp_path / "run", "block=rfa", "trainer.max_steps=4", *schedule)
    assert [row["train/lr"] for row in rows] == pytest.approx([0.005, 0.01, 0.005, 0.0])


def test_the_second_beta_reaches_the_optimiser():
    text = micro_batches(*sequences(16), 8, steps=2)
    a, b = (fit(module(betas=[0.9, second]), text, steps=2) for second in (0.95, 0.5))
    assert not torch.equal(a["model.embedding.weight"], b["model.embedding.weight"])
    lm = module(betas=[0.8, 0.7])
    fit(lm, text)
    assert all(group["betas"] == (0.8, 0.7) for group in lm.trainer.optimizers[0].param_groups)
