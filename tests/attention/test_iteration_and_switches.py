"""Iterated reweighting, and the switches of Appendix G: which exclude each other, and which no yaml has."""

import pytest
import torch

from polarlm.attention import PolarAttention
from polarlm.attention.parts import influence
from polarlm.errors import UserError
from tests.attention.appendix_g import LENGTH, SHAPE, WIDTH, model_of, run, stream


@pytest.mark.parametrize("switches", [{}, {"consensus": "gate"}, {"kernel": "exponential", "radial": "own"}], ids=str)
def test_one_estimate_per_layer_is_the_block_without_iteration(switches, monkeypatch):
    x, calls = stream(1, LENGTH, WIDTH), []
    estimate = influence.robust_attention
    monkeypatch.setattr(influence, "robust_attention", lambda *given: calls.append(given[0]) or estimate(*given))
    assert torch.equal(run(x, irls_steps=1, **switches)[0], run(x, **switches)[0])
    assert len(calls) == 2  # one each
    again, _ = run(x, irls_steps=3, **switches)
    assert len(calls) == 5 and (again - run(x, **switches)[0]).abs().max() > 1e-3
    # Every further one starts from a direction on the same sphere: what the keys said, at the queries' radius.
    first, last = calls[2].q, calls[4].q
    torch.testing.assert_close(last.norm(dim=-1), first.norm(dim=-1))
    assert (last - first).abs().max() > 0.1


def test_student_mle_weighs_as_its_likelihood_does_and_its_iterations_converge():
    x = stream(1, LENGTH, WIDTH)
    _, record = run(x, kernel="student_mle", nu_t=2.0, transport="rotary", frequencies="shared")
    q, k = record["q"], record["k"]
    cos, sin = record["rotary_cos"], record["rotary_sin"]

    def turned(z):
        a, b = z.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    distance = (turned(q)[:, :, :, None] - turned(k)[:, :, None]).square().sum(-1) / 4
    expected = 1 / (1 + record["log_kappa_tilde"].exp() * distance / 2)
    torch.testing.assert_close(record["robust_weight"], expected.tril(), rtol=1e-6, atol=1e-9)
    # Every step is one of EM for the Student-t location, so they settle; the first still moves.
    outputs = [run(x, kernel="student_mle", nu_t=2.0, irls_steps=n)[0] for n in (1, 2, 60, 61)]
    assert (outputs[1] - outputs[0]).abs().max() > 1e-3
    assert (outputs[3] - outputs[2]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"consensus": "on"}, ["block.consensus", "none, gate, complex"]),
        ({"consensus": "gate", "projection": "none"}, ["block/aggregate=gate", "block.step.projection="]),
        (
            {"consensus": "gate", "kernel": "exponential", "residual_form": "dot"},
            ["block.influence.residual_form=full"],
        ),
        (
            {"consensus": "complex", "radial_correlation": "qk"},
            ["block/aggregate=complex", "block.aggregate.radial_correlation to vv"],
        ),
        ({"uncertainty": "keep"}, ["block.uncertainty", "none, carry"]),
        ({"uncertainty": "carry", "projection": "none"}, ["block/precision=carried", "block.step.projection="]),
        (
            {"uncertainty": "carry", "prior_share": 0.0, "widen_q": 0.0},
            ["block/precision=carried has no effect", "block/precision=magnitude"],
        ),
        ({"irls_steps": 1.5}, ["block.influence.irls_steps", "whole number"]),
        ({"prior_share": 1.0}, ["block.prior_share", "below 1"]),
        ({"relax_b": 0.0}, ["block.relax_b", "positive"]),
        ({"projector": "imaginary"}, ["block.projector", "real, complex"]),
        (
            {"transport": "phases", "kernel": "gaussian", "rotate_values": False},
            ["block/transport=phases", "block.transport.rotate_values=true"],
        ),
    ],
)
def test_switches_that_exclude_each_other_say_what_to_set(switches, words):
    with pytest.raises(UserError) as error:
        PolarAttention(SHAPE, **switches)
    assert all(word in str(error.value) for word in words)


def test_off_is_understood_and_a_tie_behind_gains_warns():
    assert PolarAttention(SHAPE, consensus=False, uncertainty="off").parts.aggregate.consensus == "none"
    with pytest.warns(UserWarning, match="norm_position=post"):
        PolarAttention(SHAPE, tie_output=True)
    with pytest.warns(UserWarning, match="block.step.projection=per_head stays"):
        PolarAttention(SHAPE, tie_output=True, norm_position="post", head_gate=True, projection="global")


DECODED = [
    {"consensus": "complex", "irls_steps": 2},
    {"consensus": "gate", "radial": "shared", "mu_r": 0.1},
    {"uncertainty": "carry", "widen_k": 0.5, "irls_steps": 2},
    {"uncertainty": "carry", "consensus": "gate", "transport": "phases"},
    {"radial_flow": "equilibrium", "m_eq": 2.0, "mu": 0.3},
    {"kernel": "student_mle", "transport": "unitary", "retract": "exp"},
]


@pytest.mark.parametrize("switches", DECODED, ids=str)
def test_values_of_switches_that_no_yaml_has_decode_and_keep_to_their_documents(switches):
    model, text = model_of(**switches).eval(), torch.randint(0, 31, (2, 12))
    for name, parameter in model.named_parameters():
        if "transport.angles" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        whole, cache = model(text), model.new_cache(2, 12)
        pieces = [model(part, cache=cache) for part in text.split([5, 1, 1, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)
        ids = torch.tensor([4] * 5 + [9] * 7).expand(2, -1)
        alone = torch.cat([model(part) for part in text.split([5, 7], dim=1)], dim=1)
        torch.testing.assert_close(model(text, documents=ids), alone, atol=1e-4, rtol=1e-4)
