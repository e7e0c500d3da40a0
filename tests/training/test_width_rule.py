"""optim.lr_base_width: one step changes what a model computes as much at width 512 as at 64 (a coordinate check)."""

import math

import numpy as np
import pytest
import torch

from polarlm.model.build import build_model
from polarlm.training.optimisers import build_optimiser

WIDTHS = (64, 192, 512)
ADAMW = dict(lr=3e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, estimator_lr_factor=0.5)
MODEL = dict(context=16, n_layer=2)
VOCABULARY = 97


def model_of(block: str, width: int, seed: int = 0, **options):
    torch.manual_seed(seed)
    target = {"_target_": f"polarlm.attention.{block}", "_partial_": True}
    sizes = {**MODEL, "d_model": width, "n_head": width // 16, **options}
    return build_model({"model": sizes, "block": target}, VOCABULARY)


def optimiser_of(name: str, model, base: int | None):
    own = {"momentum": 0.95} if name == "muon" else {}
    target = f"polarlm.training.optimisers.{name}"
    return build_optimiser({"_target_": target, **ADAMW, **own, "lr_base_width": base}, model)


def changes(name: str, block: str, width: int, base: int | None, tied: bool, seed: int) -> dict[str, float]:
    """RMS by which three steps change the last state of the stream, and what the output's own change adds to logits."""
    model = model_of(block, width, seed, tie_embeddings=tied)
    optimiser = optimiser_of(name, model, base)
    text = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(1))

    def look() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        record: list = []
        with torch.no_grad():
            states = model.hidden(text[:, :-1], record=record)
        return record[-1]["residual_out"], states, model.head.weight.detach().clone()

    stream, states, output = look()
    for _ in range(3):
        optimiser.zero_grad()
        model.loss(text[:, :-1], text[:, 1:]).backward()
        optimiser.step()
    after, _, changed = look()
    return {"stream": rms(after - stream), "output": rms(states @ (changed - output).T)}


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def growth(name: str, block: str, base: int | None, tied: bool) -> dict[str, float]:
    """The power of the width with which the changes grow (a fit over models of two seeds)."""
    widths = WIDTHS * 2
    rows = [changes(name, block, width, base, tied, seed=i // len(WIDTHS)) for i, width in enumerate(widths)]
    logs = [math.log2(width) for width in widths]
    return {key: np.polyfit(logs, [math.log2(row[key]) for row in rows], 1)[0] for key in rows[0]}


@pytest.mark.parametrize(("block", "tied"), [("StandardAttention", True), ("PolarAttention", False)])
def test_a_step_of_adamw_changes_as_much_at_any_width(block, tied):
    powers = growth("adamw", block, 64, tied)
    assert abs(powers["stream"]) < 0.2
    assert abs(powers["output"]) < 0.2


def test_one_rate_for_all_widths_would_not():
    powers = growth("adamw", "StandardAttention", None, tied=False)
    assert powers["stream"] > 0.3 and powers["output"] > 0.7


@pytest.mark.parametrize("width", [16, 64, 144])
def test_a_step_of_muon_lengthens_any_input_by_the_root_of_the_width(width):
    weight = torch.nn.Parameter(torch.zeros(width, width))
    weight.grad = torch.randn(width, width)
    torch.optim.Muon([weight], lr=0.1, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    lengthened = rms(torch.randn(64, width) @ weight.detach().T)
    assert lengthened == pytest.approx(0.1 * 0.2 * width**0.5, rel=0.15)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_at_the_base_width_nothing_is_scaled_and_elsewhere_the_decay_per_step_stays(name, tied):
    model = model_of("PolarAttention", 128, tie_embeddings=tied)
    names = {id(p): key for key, p in model.named_parameters()}

    def options(base: int | None) -> dict[str, tuple[float, float]]:
        groups = optimiser_of(name, model, base).param_groups
        return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}

    plain, same, wide = options(None), options(128), options(32)
    assert same == plain and wide.keys() == plain.keys()
    for key, (lr, decay) in wide.items():
        hidden = key.endswith("weight") and model.get_parameter(key).ndim == 2 and "embedding" not in key
        output = "head" in key or (tied and key == "embedding.weight")
        by_adamw = name == "adamw" or "forget" in key  # a gate is no map of the stream, so Muon leaves it
        factor = 4.0 if output or (hidden and by_adamw) else 2.0 if hidden else 1.0
        assert lr == pytest.approx(plain[key][0] / factor), key
        assert lr * decay == pytest.approx(plain[key][0] * plain[key][1]), key
