"""One native call per layer and token gives what the ordinary pass gives, and leaves to it what it cannot do."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from polarlm.attention import PolarAttention
from polarlm.attention.mixer import Mixer, MixerShape, TokenContext
from polarlm.attention.rfa import PARAMETERS as RFA_PARAMETERS
from polarlm.attention.rfa import RobustFilterAttention
from polarlm.attention.standard import StandardAttention
from polarlm.attention.xsa import ExclusiveAttention
from polarlm.block_keys import OLD
from polarlm.fast.decoding import PASSED_ON, REQUIRED
from polarlm.geometry import rotary_tables
from polarlm.model.block import Block, decode_layer
from polarlm.model.feed_forward import build_feed_forward

LENGTH = 70  # more than one block of keys


def shape(head_dim: int = 16) -> MixerShape:
    return MixerShape(d_model=32, n_head=4, n_kv_head=2, head_dim=head_dim, layer=0, n_layer=1)


def layer(mixer: Mixer) -> Block:
    """The mixer in a usual block, with the same feed-forward every time."""
    torch.manual_seed(3)
    ffn = build_feed_forward("gelu", mixer.shape.d_model, 2.0, mixer.shape.initial)
    dtype = next(mixer.parameters()).dtype
    return Block(mixer, ffn, mixer.shape).to(dtype).eval()


@torch.no_grad()
def decoded(mixer: Mixer, x: Tensor, prompt: int) -> tuple[Tensor, bool]:
    """Outputs of a prompt at once and then token by token, and whether the short way was taken."""
    cache = mixer.new_cache(x.shape[0], x.shape[1], x.device, x.dtype)
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim)
    bounds = [0, *range(prompt, x.shape[1] + 1)] if prompt else list(range(x.shape[1] + 1))
    parts, block = [], layer(mixer)
    for start, stop in itertools.pairwise(bounds):
        here = (tables[0][start:stop], tables[1][start:stop])
        context = TokenContext(here, cache=cache, positions=torch.arange(start, stop))
        parts.append(decode_layer(block, x[:, start:stop], context))
    return torch.cat(parts, dim=1), bool(cache.decoder)


@torch.no_grad()
def at_once(mixer: Mixer, x: Tensor) -> Tensor:
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim)
    return layer(mixer)(x, TokenContext(tables, positions=torch.arange(x.shape[1])))


SHORT: list[dict] = [
    {},
    {"radial_correlation": "qk", "projection": "global"},
    {"radial": "shared", "projection": "per_head", "alpha_over_m": False},
    {"radial": "none", "projection": "none", "rotate_values": False, "lift": 2},
    {"kernel": "exponential", "residual_form": "dot", "evidence_clamp": None, "alpha": 0.7, "beta": 0.9},
    {"evidence_clamp": 0.01, "nu_t": 3.0, "radial_correlation": "one", "mu_r": 0.1},
]
LONG: list[dict] = [{"irls_steps": 2}, {"retract": "norm"}, {"norm_position": "pre"}, {"frequencies": "per_head"},
                    {"kernel": "gaussian"}, {"norm_gain": "channel"}, {"backend": "reference"},
                    {"head_gate": True, "value_residual": True}]  # fmt: skip


@pytest.mark.parametrize(("switches", "short"), [(s, True) for s in SHORT] + [(s, False) for s in LONG], ids=str)
def test_polar_decodes_what_it_computes_at_once(switches: dict, short: bool) -> None:
    torch.manual_seed(0)
    mixer = PolarAttention(shape(), **switches).eval()
    x = torch.randn(2, LENGTH, 32)
    stepwise, taken = decoded(mixer, x, prompt=0 if short else 60)
    assert taken == short
    torch.testing.assert_close(stepwise, at_once(mixer, x), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("switches", [{}, {"qk_norm": False, "rotate_values": False, "decay_values": False}], ids=str)
def test_rfa_decodes_what_it_computes_at_once(switches: dict) -> None:
    torch.manual_seed(0)
    mixer = RobustFilterAttention(shape(), **switches).eval()
    x = torch.randn(3, LENGTH, 32)
    stepwise, taken = decoded(mixer, x, prompt=5)
    assert taken
    torch.testing.assert_close(stepwise, at_once(mixer, x), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("block", "switches", "short"),
    [
        (StandardAttention, {}, True),
        (StandardAttention, {"rotate_values": True}, True),
        (ExclusiveAttention, {}, True),
        (ExclusiveAttention, {"layers": []}, True),
        (StandardAttention, {"qk_norm": True}, False),
        (StandardAttention, {"head_gate": True}, False),
        (ExclusiveAttention, {"value_residual": True}, False),
        (StandardAttention, {"frequencies": "per_head"}, False),
    ],
    ids=str,
)
def test_standard_and_xsa_decode_what_they_compute_at_once(block: type[Mixer], switches: dict, short: bool) -> None:
    torch.manual_seed(0)
    mixer = block(shape(), **switches).eval()
    mixer.qkv.weight.data.mul_(4)  # scores of either sign, some far from 0
    x = torch.randn(2, LENGTH, 32)
    stepwise, taken = decoded(mixer, x, prompt=3)
    assert taken == short
    torch.testing.assert_close(stepwise, at_once(mixer, x), rtol=1e-4, atol=1e-4)


def test_a_block_that_combines_in_its_own_way_takes_the_long_way() -> None:
    class Halved(StandardAttention):
        def combine(self, v_bar: Tensor, own: Tensor) -> Tensor:
            return 0.5 * v_bar

    class HalvedExclusive(ExclusiveAttention):
        def combine(self, v_bar: Tensor, own: Tensor) -> Tensor:
            return 0.5 * v_bar

    for block in (Halved, HalvedExclusive):
        assert not decoded(block(shape()).eval(), torch.randn(1, 4, 32), prompt=2)[1]


def test_heads_that_are_no_whole_vectors_and_other_precisions_take_the_long_way() -> None:
    for mixer, x in (
        (PolarAttention(shape(head_dim=8)), torch.randn(1, 5, 32)),
        (PolarAttention(shape()).double(), torch.randn(1, 5, 32, dtype=torch.float64)),
    ):
        stepwise, taken = decoded(mixer.eval(), x, prompt=2)
        assert not taken
        torch.testing.assert_close(stepwise, at_once(mixer, x), rtol=1e-4, atol=2e-5)


def test_the_scalars_of_a_new_text_are_read_again() -> None:
    mixer = PolarAttention(shape(), radial="own").eval()
    x = torch.randn(1, 6, 32)
    before, _ = decoded(mixer, x, prompt=1)
    with torch.no_grad():
        mixer.estimator["beta"].raw.add_(2.0)
        mixer.estimator["eta_tk"].raw.add_(1.0)
    after, taken = decoded(mixer, x, prompt=1)
    assert taken and not torch.allclose(before, after)
    torch.testing.assert_close(after, at_once(mixer, x), rtol=1e-4, atol=2e-5)


def test_a_full_cache_is_refused() -> None:
    mixer = PolarAttention(shape()).eval()
    cache = mixer.new_cache(1, 1, torch.device("cpu"), torch.float32)
    context = TokenContext(rotary_tables(torch.arange(1), 16), cache=cache)
    with torch.no_grad():
        decode_layer(layer(mixer), torch.randn(1, 1, 32), context)
        assert cache.decoder
        with pytest.raises(ValueError, match="the cache holds 1 tokens, 2 were given"):
            decode_layer(layer(mixer), torch.randn(1, 1, 32), context)


def test_every_setting_of_polar_says_whether_the_short_way_knows_it() -> None:
    arguments = {name: given for part in PolarAttention(shape()).parts for name, given in part.arguments().items()}
    always = {name for name, default in arguments.items() if default is inspect.Parameter.empty}
    assert always == set(OLD) - {"backend", "frozen", "project_stream"}
    assert always <= PASSED_ON | set(REQUIRED), "see polarlm/fast/decoding.py"


def test_every_switch_of_rfa_is_known_to_its_recipe() -> None:
    named = set(inspect.signature(RobustFilterAttention).parameters) - {
        "shape",
        "kernel",
        "backend",
        "mu_spread",
        "frozen",
    }
    passed_on = {"qk_norm", "rotate_values", "decay_keys", "decay_values"}
    assert named - set(RFA_PARAMETERS) == passed_on | {"frequencies", "head_gate", "value_residual"}


def test_every_switch_of_standard_is_known_to_its_recipe() -> None:
    known = {"shape", "qk_norm", "rotate_values", "frequencies", "forgetting", "forget_bias"}
    known |= {"head_gate", "value_residual"}
    elsewhere = {"qk_gain"}  # where QK-norm's gains start
    assert set(inspect.signature(StandardAttention).parameters) == known | elsewhere
