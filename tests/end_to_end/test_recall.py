"""A block that can attend learns to recall; a probe on which nobody rises above chance would say nothing."""

import pytest

SMALLEST = [
    "data=mqar", "data.mqar.length=16", "data.mqar.pairs=2", "data.mqar.keys=8", "data.mqar.examples=8000",
    "data.mqar.eval_examples=300", "model.context=16", "model.d_model=64", "model.n_layer=2", "model.n_head=2",
    "optim.lr=1e-2", "trainer=cpu", "trainer.max_steps=300", "trainer.batch_tokens=1024", "trainer.val_every=300",
    "trainer.checkpoint_every=300", "logger=none", "diagnostics=off", "sample.tokens=0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("block", ["standard", "polar"])
def test_recall_is_learned_far_above_chance(shell, block):
    done = shell.run("train.py", *SMALLEST, f"block={block}", f"name={block}")
    assert done.code == 0, done.out
    assert shell.summary(block)["val/accuracy"] > 0.5  # chance: one value of eight
