"""The rung that must tie: QK-normed attention written as a filter is the same model, trained the same way."""

import pytest
import torch

from polarlm.model import GPT, GPTConfig
from polarlm.training.optimisers import adamw, parameter_groups, parameter_roles
from tests.contract.conftest import VOCAB, mixer_of

STEPS = 20


def models(init: str = "width") -> tuple[GPT, GPT]:
    size = GPTConfig(vocab_size=VOCAB, context=32, d_model=64, n_layer=2, n_head=4, init=init)
    return GPT(size, mixer_of("standard_qknorm")), GPT(size, mixer_of("polar_constant"))


def copy_weights(standard: GPT, polar: GPT) -> None:
    source, target = standard.state_dict(), polar.state_dict()
    for name in target:
        mixer, _, part = name.rpartition("mixer.")
        if part == "qk.weight":
            target[name] = source[f"{mixer}mixer.qkv.weight"][:128]
        elif part == "v.weight":
            target[name] = source[f"{mixer}mixer.qkv.weight"][128:]
        elif part in ("q_gain", "k_gain"):
            target[name] = source[f"{mixer}mixer.{part[0]}_norm.weight"]
        elif "estimator" not in name:
            target[name] = source[name]
    polar.load_state_dict(target)


def test_equal_weights_give_equal_losses_step_by_step():
    standard, polar = models()
    copy_weights(standard, polar)
    losses = []
    for model in (standard, polar):
        optimiser = adamw(model, lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5, estimator_lr_factor=0.5)
        generator, curve = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):  # few of the words occur, so that there is something to learn
            text = torch.randint(0, VOCAB, (4, 33), generator=generator) // 7
            loss = model.loss(text[:, :-1], text[:, 1:])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            curve.append(loss.detach())
        losses.append(torch.stack(curve))
    assert losses[0][0] - losses[0][-1] > 0.5
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("init", ["width", "gpt2"])
def test_they_start_alike_and_are_decayed_alike(init):
    standard, polar = models(init)
    groups = [parameter_groups(parameter_roles(model)) for model in (standard, polar)]
    for name in groups[0]:
        sizes = [sum(parameter.numel() for parameter in group[name]) for group in groups]
        assert sizes[0] == sizes[1], name
    for a, b in zip(standard.blocks, polar.blocks):
        values = a.mixer.qkv.weight[128:]
        assert b.mixer.v.weight.std().item() == pytest.approx(values.std().item(), rel=0.1)
        assert b.mixer.out.weight.std().item() == pytest.approx(a.mixer.out.weight.std().item(), rel=0.1)
