"""The model around the mixers: sizes, validation, initialisation, caches, documents."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from polarlm.attention import PolarAttention, StandardAttention
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig
from polarlm.model.gpt import document_positions, embedding_std

SIZE = dict(vocab_size=61, context=16, d_model=32, n_layer=2, n_head=4)
MODELS = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 5}, ["model.n_head=5", "model.d_model=32", "1, 2, 4, 8, 16, 32"]),
        ({"n_head": 32}, ["head size 1", "odd"]),
        ({"head_dim": 7}, ["head size 7", "even"]),
        ({"n_kv_head": 3}, ["model.n_kv_head=3", "model.n_head=4", "1, 2, 4"]),
        ({"n_layer": 0}, ["model.n_layer", "0", "at least 1"]),
        ({"context": -1}, ["model.context", "-1"]),
        ({"dropout": 1.0}, ["model.dropout", "1.0"]),
        ({"ffn_mult": 0.0}, ["model.ffn_mult"]),
        ({"ffn": "relu"}, ["model.ffn", "relu", "swiglu"]),
        ({"init": "xavier"}, ["model.init", "xavier", "width, gpt2"]),
        ({"frame": "sandwich"}, ["model.frame", "sandwich", "pre, post"]),
    ],
)
def test_impossible_sizes_are_refused_with_a_way_out(change, words):
    with pytest.raises(UserError) as error:
        GPT(GPTConfig(**SIZE | change), StandardAttention)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_size_builds(path):
    with initialize_config_dir(str(MODELS.parent), version_base="1.3"):
        size = OmegaConf.to_container(compose(f"model/{path.stem}").model)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, **size), StandardAttention)
    assert model.flops_per_token() > 6 * (model.parameter_count() - model.embedding.weight.numel())
    if path.stem == "gpt2":
        assert abs(model.parameter_count() / 124e6 - 1) < 0.01


def test_tied_embeddings_are_one_matrix_counted_once():
    tied, untied = (GPT(GPTConfig(**SIZE, tie_embeddings=tie), StandardAttention) for tie in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.parameter_count() - tied.parameter_count() == 61 * 32
    assert untied.flops_per_token() == tied.flops_per_token()


def test_swiglu_costs_as_much_as_gelu():
    sizes = [GPTConfig(**SIZE | {"d_model": 384, "ffn": ffn}) for ffn in ("gelu", "swiglu")]
    gelu, swiglu = (GPT(size, StandardAttention).parameter_count() for size in sizes)
    assert gelu == swiglu


def test_polar_has_the_parameters_of_standard_up_to_a_few_scalars():
    blocks = (StandardAttention, partial(PolarAttention, forgetting="none"), PolarAttention)
    standard, plain, polar = (GPT(GPTConfig(**SIZE), mixer).parameter_count() for mixer in blocks)
    assert 0 <= plain - standard <= 40 * SIZE["n_layer"]
    assert polar - plain == SIZE["n_layer"] * SIZE["n_head"] * (SIZE["d_model"] + 1)  # a gate per head


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_keep_gpt2s_deviation_where_the_fresh_loss_allows_it(tied):
    for vocabulary, width in [(256, 128), (1024, 192), (8192, 256)]:
        assert embedding_std(vocabulary, width, tied) == 0.02
    stds = [embedding_std(65, width, tied) for width in (64, 128, 256, 512, 1024)]
    assert stds == sorted(stds, reverse=True) and stds[-1] < 0.012
    # Small branches leave a tied state with its own token: then rows must be smaller still.
    assert embedding_std(65, 128, True, "gpt2") < embedding_std(65, 128, True, "width")


def test_positions_restart_with_every_document():
    documents = torch.tensor([[4, 4, 4, 1, 1, 4], [0, 0, 0, 0, 0, 0]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_a_full_cache_says_so():
    model = GPT(GPTConfig(**SIZE), StandardAttention)
    cache = model.new_cache(1, 4)
    with pytest.raises(ValueError, match="cache holds 4 tokens, 5"):
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_documents_and_cache_exclude_each_other():
    model, text = GPT(GPTConfig(**SIZE), StandardAttention), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="exclude each other"):
        model(text, documents=text, cache=model.new_cache(1, 4))


def test_longer_than_the_training_context_works():
    model = GPT(GPTConfig(**SIZE), PolarAttention).eval()
    text = torch.randint(0, 61, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(text)[:, :16], model(text[:, :16]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", [StandardAttention, PolarAttention])
def test_dropout_acts_in_training_only(mixer):
    model, text = GPT(GPTConfig(**SIZE, dropout=0.2), mixer), torch.randint(0, 61, (2, 8))
    with torch.no_grad():
        assert not torch.equal(model(text), model(text))
        model.eval()
        assert torch.equal(model(text), model(text))


def test_dropout_acts_on_the_embedding():
    model, record = GPT(GPTConfig(**SIZE | {"d_model": 256}, dropout=0.25), StandardAttention), []
    text = torch.randint(0, 61, (4, 16))
    model(text, record=record)
    entering, embedded = record[0]["residual_in"], model.embedding(text)
    dropped = entering == 0
    assert abs(dropped.float().mean() - 0.25) < 0.03
    torch.testing.assert_close(entering[~dropped], embedded[~dropped] / 0.75)


def test_loss_counts_only_real_targets():
    model = GPT(GPTConfig(**SIZE), StandardAttention)
    text, targets = torch.randint(0, 61, (2, 8)), torch.randint(0, 61, (2, 8))
    targets[0, 3:] = -100
    each = model.loss(text, targets, reduction="none")
    assert each.shape == (2, 8) and (each[0, 3:] == 0).all()
    torch.testing.assert_close(model.loss(text, targets), each.sum() / 11)
    torch.testing.assert_close(model.loss(text, targets, reduction="sum"), each.sum())


def test_same_seed_same_model_whatever_came_before():
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(GPT(GPTConfig(**SIZE), PolarAttention))
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mixer", [StandardAttention, PolarAttention])
def test_post_norm_gives_every_layer_a_stream_of_unit_size(mixer):
    model, record = GPT(GPTConfig(**SIZE, frame="post"), mixer), []
    text = torch.randint(0, 61, (2, 16))
    loss = model.loss(text[:, :-1], text[:, 1:])
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert abs(loss.item() / math.log(61) - 1) < 0.02
    with torch.no_grad():
        model(text, record=record)
    for layer in record:
        for name in ("residual_in", "residual_mid", "residual_out"):
            torch.testing.assert_close(layer[name].square().mean(-1), torch.ones(2, 16), rtol=1e-2, atol=1e-2)


def test_a_pass_has_the_rotary_tables_of_its_own_length_and_precision():
    model, tokens = GPT(GPTConfig(11, 8, 16, 1, 2), PolarAttention), torch.arange(9)[None] % 11
    with torch.inference_mode():
        model(tokens[:, :5])
    model.loss(tokens[:, :5], tokens[:, 1:6]).backward()  # tables of inference mode could not be differentiated through
    for length, dtype in ((9, torch.float32), (5, torch.float32), (5, torch.float64)):
        model.to(dtype)
        cos, sin = model._from_the_start(torch.arange(length))
        expected = rotary_tables(torch.arange(length), model.rotary_dim, model.config.rope_base, dtype=dtype)
        assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
        assert model._from_the_start(torch.arange(length))[0] is cos
