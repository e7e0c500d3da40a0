"""A layer decoded in one native call gives what its modules give; what it cannot do, it leaves to them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from polarlm.attention import PolarAttention
from polarlm.attention.mixer import Mixer, MixerShape, TokenContext
from polarlm.attention.rfa import RobustFilterAttention
from polarlm.attention.standard import StandardAttention
from polarlm.attention.xsa import ExclusiveAttention
from polarlm.model import GPT, GPTConfig

LENGTH = 67  # more than one block of keys


def model(mixer=StandardAttention, options: dict | None = None, **changes) -> GPT:
    options = dict(options or {})
    changes = {"frame": options.pop("frame", "pre"), **changes}
    torch.manual_seed(0)
    size = dict(vocab_size=11, context=LENGTH, d_model=48, n_layer=2, n_head=4, n_kv_head=2, head_dim=16)
    return GPT(GPTConfig(**(size | changes)), functools.partial(mixer, **options)).eval()


@torch.no_grad()
def token_by_token(gpt: GPT, tokens: Tensor) -> tuple[Tensor, bool]:
    """Logits of a prompt and then of one token after the other, and whether whole layers were decoded."""
    cache = gpt.new_cache(len(tokens), tokens.shape[1])
    parts = [gpt(tokens[:, :3], cache=cache)] + [gpt(tokens[:, i : i + 1], cache=cache) for i in range(3, LENGTH)]
    return torch.cat(parts, dim=1), bool(cache.layers[0].decoder)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        (StandardAttention, {}),
        (ExclusiveAttention, {"rotate_values": True}),
        (RobustFilterAttention, {}),
        (PolarAttention, {"frame": "pre+tangent"}),
        (PolarAttention, {"projection": "evidence", "radial": "own"}),
        (ExclusiveAttention, {"frame": "pre+tangent_both"}),
    ],
    ids=["standard", "xsa", "rfa", "polar", "polar_paper", "both branches across the stream"],
)
def test_layers_decode_what_they_compute_at_once(mixer, options: dict, rows: int) -> None:
    gpt = model(mixer, options, ffn="gelu" if rows % 2 else "swiglu")
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.rand_like(parameter))
    tokens = torch.randint(11, (rows, LENGTH))
    logits, taken = token_by_token(gpt, tokens)
    assert taken
    with torch.no_grad():
        torch.testing.assert_close(logits, gpt(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mixer", "options", "changes"),
    [
        (StandardAttention, {}, {"frame": "post"}),
        (StandardAttention, {}, {"frame": "scaled"}),
        (StandardAttention, {}, {"ffn": "relu2"}),
        (StandardAttention, {}, {"ffn_width": 40}),
        (StandardAttention, {}, {"d_model": 40}),
        (StandardAttention, {"head_gate": True}, {}),
        (PolarAttention, {"tie_output": True, "norm_position": "post"}, {}),
    ],
    ids=str,
)
def test_other_layers_take_the_long_way(mixer, options: dict, changes: dict) -> None:
    gpt, tokens = model(mixer, options, **changes), torch.randint(11, (2, LENGTH))
    logits, taken = token_by_token(gpt, tokens)
    assert not taken
    with torch.no_grad():
        torch.testing.assert_close(logits, gpt(tokens), rtol=1e-4, atol=1e-4)


def test_a_mixer_that_knows_nothing_of_decoders_takes_the_long_way() -> None:
    class Mean(Mixer):
        def __init__(self, shape: MixerShape) -> None:
            super().__init__(shape)
            self.out = torch.nn.Linear(shape.d_model, shape.d_model, bias=False)

        def forward(self, x: Tensor, context: TokenContext) -> Tensor:
            if context.cache is not None:
                context.cache.length += x.shape[1]
            return self.out(x)

    tokens = torch.randint(11, (1, LENGTH))
    assert not token_by_token(model(Mean), tokens)[1]


def test_who_listens_to_a_module_hears_every_token() -> None:
    gpt, heard = model(), []
    gpt.blocks[0].feed_forward.down.register_forward_hook(lambda module, given, out: heard.append(out.shape[1]))
    token_by_token(gpt, torch.randint(11, (1, LENGTH)))
    assert heard == [3] + [1] * (LENGTH - 3)


def test_a_full_cache_is_refused() -> None:
    gpt = model()
    with torch.no_grad():
        cache = gpt.new_cache(1, 2)
        gpt(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        gpt(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="the cache holds 2 tokens, 3 were given"):
            gpt(torch.zeros(1, 1, dtype=torch.long), cache=cache)
