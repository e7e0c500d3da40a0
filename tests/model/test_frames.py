"""Residual frames against their published formulas, written out in numpy."""

from functools import partial

import numpy as np
import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, StandardAttention
from polarlm.attention.ngpt import NormalisedAttention
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.model.block import FRAMES, Geodesic
from polarlm.model.build import frame_of
from polarlm.model.config import CONNECTIONS, FRAME_NAMES
from polarlm.training.optimisers import build_optimiser

SIZE = dict(vocab_size=17, context=8, d_model=16, n_layer=3, n_head=2)


def model_of(frame: str, attention=StandardAttention, **changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZE | changes, frame=frame), attention).double()


def states(model: GPT) -> list[dict[str, np.ndarray]]:
    """Stream and branch outputs of every layer, as numpy."""
    record: list[dict] = []
    outputs = []
    for block in model.blocks:
        for branch in (block.mixer, block.feed_forward):
            branch.register_forward_hook(lambda module, given, out: outputs.append((given[0], out)))
    with torch.no_grad():
        model(torch.randint(0, 17, (2, 8)), record=record)
    rows = []
    for layer, seen in enumerate(record):
        (read_a, said_a), (read_f, said_f) = outputs[2 * layer : 2 * layer + 2]
        values = dict(x=seen["residual_in"], mid=seen["residual_mid"], out=seen["residual_out"])
        values |= dict(read_a=read_a, said_a=said_a, read_f=read_f, said_f=said_f)
        rows.append({name: value.numpy() for name, value in values.items()})
    return rows


def halves(row):
    """(stream before, what the branch read, what it said, stream after) of both halves."""
    return [
        (row["x"], row["read_a"], row["said_a"], row["mid"]),
        (row["mid"], row["read_f"], row["said_f"], row["out"]),
    ]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_every_frame_has_a_name_in_the_settings():
    assert set(FRAMES) == set(CONNECTIONS) == {name.partition("+")[0] for name in FRAME_NAMES}


def test_layernorm_scaling_divides_what_layer_l_reads_by_the_root_of_l():
    for layer, row in enumerate(states(model_of("scaled")), start=1):
        for x, read, said, after in halves(row):
            normalised = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            np.testing.assert_allclose(read, normalised / np.sqrt(layer), rtol=1e-9)
            np.testing.assert_allclose(after, x + said, rtol=1e-9)


def test_geonorm_is_the_exponential_map_of_the_tangential_step():
    for layer, row in enumerate(states(model_of("geodesic")), start=1):
        for x, read, said, after in halves(row):
            np.testing.assert_array_equal(read, x)
            radius = np.linalg.norm(x, axis=-1, keepdims=True)
            tangent = said - (said * x).sum(-1, keepdims=True) / radius**2 * x
            length = np.linalg.norm(tangent, axis=-1, keepdims=True)
            theta = length / radius / np.sqrt(layer)
            np.testing.assert_allclose(after, np.cos(theta) * x + np.sin(theta) * radius * tangent / length, rtol=1e-9)
            np.testing.assert_allclose(np.linalg.norm(after, axis=-1), 4.0, rtol=1e-6)  # sqrt(16), for ever


def test_a_geodesic_step_never_goes_further_than_a_quarter_circle():
    shape = MixerShape(d_model=6, n_head=2, n_kv_head=2, head_dim=3, layer=0, n_layer=2)
    walk, x = Geodesic(shape), torch.randn(4, 6, dtype=torch.float64)
    across = torch.randn(4, 6, dtype=torch.float64)
    across = across - (across * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
    long, short = walk.write(x, 50 * across), walk.write(x, 1e-3 * across)
    end = across / across.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(long, end, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(short, x + 1e-3 * across, rtol=1e-4, atol=1e-6)


def test_ngpt_walks_from_unit_vector_to_unit_vector():
    model = model_of("ngpt")
    with torch.no_grad():
        for block in model.blocks:
            block.mixer_norm.rate.raw.mul_(torch.linspace(-1.5, 1.5, 16))  # channels differ; the sign does not matter
    for block, row in zip(model.blocks, states(model), strict=True):
        for (x, read, said, after), walk in zip(halves(row), (block.mixer_norm, block.ffn_norm)):
            alpha = np.abs(walk.rate.raw.detach().numpy()) * (1 / 3) * np.sqrt(16)  # s' init/scale
            h = unit(x)
            np.testing.assert_allclose(unit(after), unit(h + alpha * (unit(said) - h)), rtol=1e-7)
            np.testing.assert_array_equal(read, x)


def test_ngpts_hidden_units_are_scaled_and_its_gate_by_the_root_of_the_width():
    """h_M ~ W_o (s_u W_u h * silu(s_v sqrt(d) W_v h)) of the unit state h; only its direction counts."""
    model = model_of("ngpt")
    with torch.no_grad():
        for block in model.blocks:
            factor = block.feed_forward.gate_up.factor.raw
            factor.mul_(torch.linspace(0.5, 2.0, len(factor)))
    for block, row in zip(model.blocks, states(model), strict=True):
        both = block.feed_forward.gate_up.weight.detach().numpy() @ unit(row["mid"])[..., None]
        both = both[..., 0] * block.feed_forward.gate_up.factor.raw.detach().numpy()
        gate, up = np.split(both, 2, axis=-1)
        gate = gate * np.sqrt(16)
        said = (gate / (1 + np.exp(-gate)) * up) @ block.feed_forward.down.weight.detach().numpy().T
        np.testing.assert_allclose(unit(row["said_f"]), unit(said), rtol=1e-6)


def test_ngpt_starts_at_the_published_values():
    """alpha of order 1/L, every other factor 1; kept as s' = s scale/init, so that Adam moves all of them alike."""
    model = model_of("ngpt", attention=NormalisedAttention)
    wanted = [(model.output_scale(), 1.0, model.output_scale.raw, 0.25)]  # 0.25 = 1/sqrt(16)
    for block in model.blocks:
        wanted += [(walk.rate(), 1 / 3, walk.rate.raw, 0.25) for walk in (block.mixer_norm, block.ffn_norm)]
        hidden = block.feed_forward.gate_up.factor
        wanted += [(hidden(), 1.0, hidden.raw, 1.0), (block.mixer.qk_scale * 4, 1.0, block.mixer.qk_scale, 0.25)]
        assert not hasattr(block.feed_forward.down, "factor")
    for value, start, kept, scale in wanted:
        torch.testing.assert_close(value, torch.full_like(value, start))
        torch.testing.assert_close(kept, torch.full_like(kept, scale))


@pytest.mark.parametrize("tied", [True, False])
def test_ngpt_logits_are_scaled_cosines(tied):
    model = model_of("ngpt", tie_embeddings=tied)
    with torch.no_grad():
        model.output_scale.raw.add_(0.1 * torch.rand(17, 1))
    tokens = torch.randint(0, 17, (2, 8))
    record: list[dict] = []
    logits = model(tokens, record=record).detach().numpy()
    words = unit(model.head.weight.detach().numpy())
    scale = model.output_scale.raw.detach().numpy()[:, 0] * np.sqrt(16)
    cosines = unit(record[-1]["residual_out"].detach().numpy()) @ words.T
    np.testing.assert_allclose(logits, scale * cosines, rtol=1e-6)
    loss = model.loss(tokens, tokens, reduction="none").detach().numpy()
    picked = np.take_along_axis(logits, tokens.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, np.log(np.exp(logits).sum(-1)) - picked, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_are_back_on_their_spheres_after_every_step(name):
    options = dict(lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, estimator_lr_factor=1.0, grad_clip=1.0)
    options |= {"momentum": 0.95} if name == "muon" else {}
    model = model_of("ngpt").float()
    optimiser = build_optimiser({"_target_": f"polarlm.training.optimisers.{name}", **options}, model)
    for _ in range(2):
        model.loss(torch.randint(0, 17, (2, 8)), torch.randint(0, 17, (2, 8))).backward()
        optimiser.step()
    rows = [model.embedding.weight, model.head.weight]
    columns = []
    for block in model.blocks:
        rows += [block.mixer.qkv.weight, block.feed_forward.gate_up.weight]
        columns += [block.mixer.out.weight, block.feed_forward.down.weight]
    for weight in rows:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(weight.shape[0]))
    for weight in columns:
        torch.testing.assert_close(weight.norm(dim=0), torch.ones(weight.shape[1]))


def test_a_raw_block_refuses_a_frame_that_scales_norms():
    with pytest.raises(UserError, match=r"block\.inputs\.norm_position=both"):
        GPT(GPTConfig(**SIZE, frame="scaled"), lambda shape: PolarAttention(shape, norm_position="post"))


def test_ngpt_refuses_a_tied_output_and_geonorm_warns_of_a_second_projection():
    with pytest.raises(UserError, match="block/output=free"):
        model_of("ngpt", partial(PolarAttention, tie_output=True, norm_position="post"))
    with pytest.warns(UserWarning, match="tangent_both has no effect with the frame geodesic") as heard:
        model_of("geodesic+tangent_both", PolarAttention)
    assert len(heard) == 1  # not one per layer


def test_ngpt_refuses_to_start_at_zero():
    with pytest.raises(UserError, match="zero_init=false"):
        GPTConfig(**SIZE, frame="ngpt", zero_init=True)


def test_two_frames_are_refused_and_one_is_taken():
    assert frame_of(None, {"frame": "post"}) == {}
    assert frame_of("geodesic", {"frame": "pre"}) == {"frame": "geodesic"}
    with pytest.raises(UserError, match="leave out model"):
        frame_of("geodesic", {"frame": "post"})
