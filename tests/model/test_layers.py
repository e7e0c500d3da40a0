"""PolarSelfAttention and PolarBlock: the modules of GPT, usable in any torch model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from polarlm import PolarBlock, PolarSelfAttention
from polarlm.attention import PolarAttention
from polarlm.attention.mixer import TokenContext
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEADS, TOKENS = 32, 4, 12


def stream(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gpt_block() -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = dict(vocab_size=7, context=TOKENS, d_model=WIDTH, n_layer=1, n_head=HEADS)
    return GPT(GPTConfig(**sizes, frame="pre+tangent"), PolarAttention).blocks[0]


def test_a_block_computes_what_the_block_of_a_gpt_computes():
    own, x = gpt_block(), stream()
    layer = PolarBlock(WIDTH, HEADS)
    layer.block.load_state_dict(own.state_dict())
    context = TokenContext(rotary_tables(torch.arange(TOKENS), WIDTH // HEADS, 10000.0), positions=torch.arange(TOKENS))
    assert torch.equal(layer(x), own(x, context))
    attention = PolarSelfAttention(WIDTH, HEADS)
    attention.attention.load_state_dict(own.mixer.state_dict())
    assert torch.equal(attention(x), own.mixer(x, context))


@pytest.mark.parametrize("made", [PolarSelfAttention, PolarBlock])
def test_a_fresh_layer_has_the_numbers_of_a_fresh_gpt(made):
    """The calibration of W_o is part of the layer."""
    mean = torch.stack([made(WIDTH, HEADS)._mixer.out.weight.std() for _ in range(8)]).mean().item()
    expected = torch.stack([gpt_block().mixer.out.weight.std() for _ in range(8)]).mean().item()
    assert mean == pytest.approx(expected, rel=0.1)


def test_the_steps_of_a_block_are_orthogonal_to_the_stream():
    x = stream(dtype=torch.float64)
    step = PolarBlock(WIDTH, HEADS, ffn="none").double()(x) - x
    assert cosine_similarity(step, x, dim=-1).abs().max() < 1e-6 and step.norm() > 0.1
    free = PolarBlock(WIDTH, HEADS, ffn="none", frame="pre").double()(x) - x
    assert cosine_similarity(free, x, dim=-1).abs().mean() > 1e-3


@pytest.mark.parametrize("made", [PolarSelfAttention, PolarBlock])
@pytest.mark.parametrize("options", [{}, dict(n_kv_head=2, radial="own", projection="evidence", backend="reference")])
def test_decoding_with_a_cache_equals_the_full_pass(made, options):
    layer, x = made(WIDTH, HEADS, **options).eval(), stream()
    with torch.no_grad():
        full, cache = layer(x), layer.new_cache(2, TOKENS)
        pieces = [layer(part, cache=cache) for part in x.split([5, 1, 1, 1, 4], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), full, atol=1e-5)
    with pytest.raises(ValueError, match="make it longer"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize("made", [PolarSelfAttention, PolarBlock])
def test_documents_do_not_see_each_other_and_nobody_sees_the_future(made):
    layer, x = made(WIDTH, HEADS).eval(), stream()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    packed = layer(x, documents=documents)
    assert torch.allclose(packed[:1, 5:], layer(x[:1, 5:]), atol=1e-5)
    assert torch.allclose(layer(x)[:, :4], layer(x[:, :4]), atol=1e-5)
    layer(x).square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(d_model="512"), "d_model='512' must be a whole number"),
        (dict(n_head=5), "n_head=5 does not divide d_model=32"),
        (dict(kernel="cauchy"), "kernel is 'cauchy'; allowed: student"),
        (
            dict(influence="gaussian", irls_steps=2),
            "influence.irls_steps=2 reweights by residuals, and influence=gaussian",
        ),
        (dict(kernle="student"), "no argument 'kernle'. Did you mean kernel"),
        (dict(nu_t="many"), "nu_t is 'many'; it must be a number"),
        (dict(nu_t=-1), "nu_t is -1"),
        (dict(rotate_values="yes"), "rotate_values is 'yes'; it must be True or False"),
        (dict(frozen="alpha"), "frozen is 'alpha'; it must be a list"),
        (dict(value_residual=True), "needs polarlm.model.GPT"),
        (dict(dropout=2), "dropout=2 must be"),
    ],
)
@pytest.mark.parametrize("made", [PolarSelfAttention, PolarBlock])
def test_a_wrong_argument_is_named_as_it_was_written(made, arguments, words):
    with pytest.raises(UserError) as refused:
        made(**dict(d_model=WIDTH, n_head=HEADS) | arguments)
    assert words in str(refused.value) and not re.search("block[./]", str(refused.value))


def test_wrong_inputs_are_named_too():
    layer, x = PolarSelfAttention(WIDTH, HEADS), stream()
    for inputs, words in (
        (dict(x=x[0]), "x has the shape (12, 32); it must be (batch, tokens, d_model=32)"),
        (dict(x=x.long()), "x is a tensor of torch.int64"),
        (dict(x=[1.0]), "x is of type list"),
        (dict(x=x, documents=torch.zeros(3)), "documents is (3,)"),
        (dict(x=x, cache={}), "cache is of type dict"),
        (dict(x=x, cache=layer.new_cache(1, 4)), "cache has 1 rows and x has 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            layer(**inputs)
    with pytest.raises(ValueError, match="use PolarBlock"):
        PolarSelfAttention(WIDTH, HEADS, frame="pre+tangent")


def test_importing_polarlm_does_not_import_torch():
    code = "import sys, polarlm; assert 'torch' not in sys.modules; from polarlm import PolarBlock; PolarBlock(16, 2)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_lines_in_the_readme_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "PolarSelfAttention" in code)
    names: dict = {}
    exec(block, names)
    assert names["y"].shape == names["x"].shape
