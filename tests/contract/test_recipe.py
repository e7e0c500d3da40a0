"""Every piece of a recipe does the same to every block: causal, cached, counted, exported, compiled, trainable."""

import copy
import functools
import math

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from polarlm.block_keys import current_overrides
from polarlm.errors import UserError
from polarlm.launch.check import check_train
from polarlm.locations import CONFIGS
from polarlm.model import GPT
from polarlm.model.build import build_model
from polarlm.runs.export.folder import export_run, import_run
from polarlm.runs.restore import restore_run
from polarlm.training.optimisers import build_optimiser
from tests.contract.conftest import COMPILED, VOCAB, stir
from tests.runs.made_up_run import made_up_run

BLOCKS = ("standard", "xsa", "rfa", "polar")
SIZE = ["model.context=32", "model.d_model=32", "model.n_layer=3", "model.n_head=4"]
GATES = ["block.head_gate=true", "block.value_residual=true"]
EVERYTHING = ["recipe=modern", *GATES]
PIECES = {
    "modern": ["recipe=modern"],
    "head_gate": ["block.head_gate=true"],
    "value_residual": ["block.value_residual=true", "model.n_kv_head=2"],
    "zero_init": ["model.zero_init=true"],
    "logit_cap": ["model.logit_cap=2.0"],
    "relu2": ["model.ffn=relu2"],
}


def settings(*overrides: str) -> dict:
    return copy.deepcopy(composed(overrides))


@functools.cache
def composed(overrides: tuple[str, ...]) -> dict:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        typed = current_overrides([*SIZE, *overrides])[0]
        return check_train(OmegaConf.to_container(compose("train", overrides=typed), resolve=True))


def build(block: str, *overrides: str, fresh: bool = False) -> GPT:
    torch.manual_seed(5)
    model = build_model(settings(f"block={block}", *overrides), VOCAB)
    if fresh:
        return model
    with torch.no_grad():  # what starts at zero must have a say too
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.3)
    return stir(model)


def text(length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, length))


@pytest.mark.parametrize(
    ("block", "pieces"),
    [(block, EVERYTHING) for block in BLOCKS]
    + [(block, pieces) for pieces in PIECES.values() for block in ("standard", "polar")],
)
def test_cached_decoding_equals_the_full_forward_and_sees_no_future(block, pieces):
    model, tokens = build(block, *pieces).eval(), text()
    cache = model.new_cache(2, 12)
    with torch.no_grad():
        parts = [model(piece, cache=cache) for piece in tokens.split([5, 1, 1, 4, 1], dim=1)]
        whole = model(tokens)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
        other = tokens.clone()
        other[:, 8:] = (other[:, 8:] + 1) % VOCAB
        torch.testing.assert_close(model(other)[:, :8], whole[:, :8], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_packed_documents_and_recomputed_blocks_change_nothing(block):
    model, tokens = build(block, *EVERYTHING), text(14)
    documents = torch.repeat_interleave(torch.tensor([7, 3]), torch.tensor([5, 9])).expand(2, -1)
    with torch.no_grad():
        alone = torch.cat([model(piece) for piece in tokens.split([5, 9], dim=1)], dim=1)
        torch.testing.assert_close(model(tokens, documents=documents), alone, atol=1e-4, rtol=1e-4)
    recomputed = build(block, *EVERYTHING, "model.checkpointing=true")
    for each in (model, recomputed):
        each.loss(tokens, tokens).backward()
    for (name, a), b in zip(model.named_parameters(), recomputed.parameters(), strict=True):
        assert a.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_step_is_one_graph(block):
    torch._dynamo.reset()
    model, tokens = build(block, *EVERYTHING, "model.n_layer=2"), text()
    # Capture alone: what is generated from a captured graph is tested for every class of blocks.
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(tokens, tokens), model.loss(tokens, tokens))


@pytest.mark.parametrize("block", BLOCKS)
def test_flops_are_counted(block):
    plain, gated = build(block, "recipe=modern"), build(block, "recipe=modern", *GATES)
    assert gated.flops_per_token() - plain.flops_per_token() == 6 * 3 * 4 * 32  # three layers, four heads, width 32
    matrices = sum(p.numel() for name, p in gated.named_parameters() if p.dim() > 1 and "embedding" not in name)
    assert gated.flops_per_token(1) >= 6 * matrices
    assert gated.parameter_count() - plain.parameter_count() == 3 * 4 * 32 + 2  # the first layer has no share to learn


@pytest.mark.parametrize("block", BLOCKS)
def test_the_recipe_reaches_every_block_and_every_piece_can_be_taken_away(block):
    config = settings(f"block={block}", "recipe=modern")
    assert config["optim"]["_target_"].endswith("muon") and not config["model"]["tie_embeddings"]
    assert config["block"].get("qk_norm", True)
    assert settings(f"block={block}", "recipe=modern", "optim=adamw")["optim"]["_target_"].endswith("adamw")
    if "qk_norm" in config["block"]:
        assert not settings(f"block={block}", "recipe=modern", "block.qk_norm=false")["block"]["qk_norm"]
    assert settings(f"block={block}", "recipe=modern", "model.logit_cap=null")["model"]["logit_cap"] is None


@pytest.mark.parametrize("block", [name for name in COMPILED if name not in (*BLOCKS, "ngpt")])
def test_the_recipe_goes_around_every_other_kind_of_block(block):
    config = settings(f"block={block}", "recipe=modern")
    torch.manual_seed(0)
    model, words = build_model(config, VOCAB), text()
    optimiser, losses = build_optimiser(config["optim"], model), []
    for _ in range(3):
        losses.append(torch.nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten()))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[0].item() == pytest.approx(math.log(VOCAB), abs=0.2) and losses[-1] < losses[0]


def test_the_recipe_is_refused_by_a_frame_that_contradicts_it_and_goes_around_it_without_that_piece():
    """nGPT's matrices have rows of length 1: they cannot start at zero."""
    with pytest.raises(UserError, match=r"set model.zero_init=false"):
        build_model(settings("block=ngpt", "recipe=modern"), VOCAB)
    assert build_model(settings("block=ngpt", "recipe=modern", "model.zero_init=false"), VOCAB)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_fresh_model_knows_nothing_and_learns_at_once(block):
    config = settings(f"block={block}", *EVERYTHING, "optim.lr=0.01")
    model, tokens = build(block, *EVERYTHING, fresh=True), text(32)
    optimiser = build_optimiser(config["optim"], model)
    losses = []
    for _ in range(12):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] / math.log(VOCAB) - 1) < 0.02
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_zero_init_makes_every_branch_silent(block):
    model, record = build(block, "model.zero_init=true", fresh=True), []
    with torch.no_grad():
        model(text(), record=record)
    for layer in record:
        torch.testing.assert_close(layer["residual_out"], layer["residual_in"], atol=0, rtol=0)


@pytest.mark.parametrize("block", BLOCKS)
def test_gates_start_open_and_close_single_heads(block):
    plain, gated = build(block, fresh=True), build(block, "block.head_gate=true", fresh=True)
    gated.load_state_dict(plain.state_dict(), strict=False)
    tokens = text()
    with torch.no_grad():
        torch.testing.assert_close(gated(tokens), plain(tokens))
        mixer = gated.blocks[0].mixer
        seen = []
        mixer.out.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].unflatten(-1, (4, -1))))
        mixer.head_gate.weight[1] = -1e4
        mixer.head_gate.register_forward_pre_hook(lambda _, arguments: (torch.ones_like(arguments[0]),))
        gated(tokens)
    norms = seen[0].square().sum((0, 1, 3))
    assert norms[1] == 0 and (norms[[0, 2, 3]] > 0).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_share_of_one_is_the_first_layers_values(block):
    model, record = build(block, "block.value_residual=true"), []
    with torch.no_grad():
        for layer in model.blocks[1:]:
            layer.mixer.value_residual.share.fill_(1.0)
        model(text(), record=record)
    torch.testing.assert_close(record[2]["v"], record[0]["v"])
    assert model.blocks[0].mixer.value_residual.share is None


@pytest.mark.parametrize("block", ["standard", "polar"])
def test_an_export_comes_back_the_same(tmp_path, block):
    switches = {"head_gate": True, "value_residual": True}
    sizes = {"ffn": "relu2", "zero_init": True, "logit_cap": 15.0, "tie_embeddings": False}
    run = made_up_run(tmp_path / "run", block, switches, **sizes)
    assert export_run(run, tmp_path / "out")  # no Llama any more
    import_run(tmp_path / "out", tmp_path / "again")
    tokens = torch.randint(0, 256, (2, 12))
    with torch.no_grad():
        assert torch.equal(restore_run(tmp_path / "again", "cpu").model(tokens), run.model(tokens))
        assert run.model(tokens).abs().max() <= 15
