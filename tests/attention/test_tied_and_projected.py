"""Tangency carried into the stream: tied output, projected stream, the complex projector."""

from dataclasses import replace

import pytest
import torch

from polarlm.attention import ExclusiveAttention, MixerShape, PolarAttention, StandardAttention
from polarlm.attention.parts.output import make_orthonormal
from tests.attention.appendix_g import LENGTH, SHAPE, WIDTH, model_of, run, stream


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_g11_a_tied_output_keeps_the_step_tangent_in_the_stream(kv_heads, norm_position):
    shape = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=kv_heads, head_dim=8, layer=0, n_layer=2)
    z = stream(2, LENGTH, WIDTH)
    switches = dict(norm_position=norm_position, norm_values=True, radial="none")
    tied, _ = run(z, shape=shape, tie_output=True, **switches)
    loose, _ = run(z, shape=shape, **switches)

    def tangency(out):
        return ((z * out).sum(-1) / (z.norm(dim=-1) * out.norm(dim=-1)).clamp_min(1e-9))[:, 1:].abs().max()

    assert tied.norm() > 1
    # In `pre` the magnitude is the stream's, and W_v z itself is not on the sphere; it is parallel to v all the same.
    assert tangency(tied) < 1e-7 and tangency(loose) > 0.05


def test_a_tied_output_of_grouped_heads_carries_the_mean_of_their_steps():
    """With W_o W_v = I, what every query head says alike reaches the stream as it is, not once per query head."""
    shape, z = replace(SHAPE, n_kv_head=2, head_dim=16), stream(1, LENGTH, WIDTH)
    switches = dict(tie_output=True, norm_position="post", nu_t=4.0, mu=0.0, kernel="gaussian")  # heads agree
    out, record = run(z, shape=shape, **switches)
    torch.manual_seed(3)
    weight = PolarAttention(shape, **switches).double().v.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(32, dtype=torch.float64), atol=1e-5, rtol=0)
    latent = record["update"].detach()[:, ::2].transpose(1, 2).flatten(-2)  # of one query head of either value head
    torch.testing.assert_close(out @ weight.T, latent, atol=1e-5, rtol=1e-5)


def test_tied_matrices_stay_orthonormal_through_training_and_share_their_gradient():
    model = model_of(tie_output=True, norm_position="post")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, 31, (2, 11))
    start = model.blocks[0].mixer.v.weight.detach().clone()
    for _ in range(3):
        model.loss(text[:, :-1], text[:, 1:]).backward()
        optimiser.step()
        optimiser.zero_grad()
    weight = model.blocks[0].mixer.v.weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert (weight - start).abs().max() > 1e-3
    tall = torch.nn.Linear(8, 16, bias=False)
    make_orthonormal(tall)
    torch.testing.assert_close(tall.weight.T @ tall.weight, torch.eye(8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("frame", ["pre", "pre+tangent", "pre+tangent_both"])
@pytest.mark.parametrize("block", [PolarAttention, StandardAttention, ExclusiveAttention])
def test_e11_a_projected_stream_grows_by_what_is_added_and_no_more(block, frame):
    record: list = []
    with torch.no_grad():
        model_of(block, frame=frame)(torch.randint(0, 31, (2, 10)), record=record)
    for layer in record:
        before, middle, after = (layer[f"residual_{name}"].double() for name in ("in", "mid", "out"))
        for branch, (a, b) in {"attention": (before, middle), "feed_forward": (middle, after)}.items():
            excess = (b.square().sum(-1) - a.square().sum(-1) - (b - a).square().sum(-1)).abs() / b.square().sum(-1)
            expected = frame.endswith("_both") or (frame == "pre+tangent" and branch == "attention")
            assert (excess.max() < 1e-5) == expected


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_e7_the_complex_projector_removes_the_phase_too(projection):
    x, along = stream(1, LENGTH, WIDTH), {}
    for projector in ("real", "complex"):
        _, record = run(x, projection=projection, projector=projector, radial="none")
        v, update = (torch.complex(*record[name].chunk(2, dim=-1)) for name in ("v", "update"))
        along[projector] = (v.conj() * update).sum((1, 3))
    assert along["real"].real.abs().max() < 1e-9 and along["real"].imag.abs().max() > 0.1
    assert along["complex"].abs().max() < 1e-9
