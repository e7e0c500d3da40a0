"""The smallest recall probe rises above chance: one on which nobody does would say nothing."""

import pytest

SMALLEST = [
    "data=mqar", "data.mqar.length=16", "data.mqar.pairs=2", "data.mqar.keys=8", "data.mqar.examples=8000",
    "data.mqar.eval_examples=300", "model.context=16", "model.d_model=64", "model.n_layer=2", "model.n_head=2",
    "optim.lr=1e-2", "trainer=cpu", "trainer.max_steps=300", "trainer.batch_tokens=1024", "trainer.val_every=300",
    "trainer.checkpoint_every=300", "logger=none", "diagnostics=off", "sample.tokens=0",
]  # fmt: skip


@pytest.mark.slow
def test_recall_is_learned_above_chance(shell):
    done = shell.run("train.py", *SMALLEST, "block=standard", "name=standard")
    assert done.code == 0, done.out
    # Chance is one value of eight. 300 steps learn which two values the text holds (a half), not yet whose is whose.
    assert shell.summary("standard")["val/accuracy"] > 0.35
