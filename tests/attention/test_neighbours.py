"""The neighbours' attention against their published formulas: plain loops in float64 numpy, one query at a time."""

import math

import numpy as np
import pytest
import torch

from polarlm.attention import MixerShape, TokenContext
from polarlm.attention.additions import HeadGate
from polarlm.attention.alibi import AlibiAttention, slopes
from polarlm.attention.fox import ForgettingAttention
from polarlm.attention.ngpt import NormalisedAttention
from polarlm.attention.xpos import XPosAttention
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.model.gpt import document_positions

WIDTH, HEADS, SIZE, TOKENS, BASE = 16, 4, 4, 7, 100.0
DOCUMENTS = torch.tensor([[5, 5, 5, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1]])
CASES = [(groups, packed) for groups in (4, 2) for packed in (False, True)]


def run(mixer_class, groups, packed, **switches):
    """(mixer, input, positions, output, record) of a stirred mixer."""
    torch.manual_seed(groups)
    mixer = mixer_class(MixerShape(WIDTH, HEADS, groups, SIZE, layer=1, n_layer=2, rope_base=BASE), **switches).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    documents = DOCUMENTS if packed else None
    positions = document_positions(DOCUMENTS) if packed else torch.arange(TOKENS)
    rotary = rotary_tables(positions, SIZE, BASE, dtype=torch.float64)
    record: dict = {}
    with torch.no_grad():
        out = mixer(x, TokenContext(rotary, documents, record=record, positions=positions))
        plain = mixer(x, TokenContext(rotary, documents, positions=positions))
    torch.testing.assert_close(plain, out)
    return mixer, x.numpy(), positions.expand(2, -1).numpy(), out.numpy(), record


def turned(vector, position):
    half = SIZE // 2
    angle = position * BASE ** (-np.arange(half) / half)
    real, imaginary = vector[:half], vector[half:]
    return np.concatenate(
        [real * np.cos(angle) - imaginary * np.sin(angle), imaginary * np.cos(angle) + real * np.sin(angle)]
    )


def attention(mixer, x, positions, packed, groups, logit):
    """Soft-max attention with logit(b, h, i, j, q, k); positions inside documents."""
    weight = mixer.qkv.weight.detach().numpy()
    q, k, v = np.split(x @ weight.T, [HEADS * SIZE, (HEADS + groups) * SIZE], axis=-1)
    heads = np.zeros((2, TOKENS, HEADS, SIZE))
    for b, i, h in np.ndindex(2, TOKENS, HEADS):
        g = h // (HEADS // groups)
        visible = [j for j in range(i + 1) if not packed or DOCUMENTS[b, j] == DOCUMENTS[b, i]]
        part = slice(h * SIZE, (h + 1) * SIZE), slice(g * SIZE, (g + 1) * SIZE)
        logits = np.array([logit(b, h, i, j, q[b, i, part[0]], k[b, j, part[1]]) for j in visible])
        weights = np.exp(logits) / np.exp(logits).sum()
        heads[b, i, h] = sum(a * v[b, j, part[1]] for a, j in zip(weights, visible))
    return heads.reshape(2, TOKENS, -1) @ mixer.out.weight.detach().numpy().T


@pytest.mark.parametrize(("groups", "packed"), CASES)
def test_alibi_subtracts_a_slope_times_the_lag(groups, packed):
    mixer, x, positions, out, _ = run(AlibiAttention, groups, packed)
    rates = [2.0 ** (-2 * (h + 1)) for h in range(HEADS)]  # 2^(-8h/4)
    expected = attention(
        mixer, x, positions, packed, groups, lambda b, h, i, j, q, k: q @ k / math.sqrt(SIZE) - rates[h] * (i - j)
    )
    np.testing.assert_allclose(out, expected, rtol=1e-7, atol=1e-10)


def test_alibis_published_slopes():
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    np.testing.assert_allclose(slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize(("groups", "packed"), CASES)
def test_xpos_fades_each_mode_with_the_lag(groups, packed):
    mixer, x, positions, out, _ = run(XPosAttention, groups, packed, scale=3.0)
    zeta = (np.arange(SIZE // 2) / (SIZE // 2) + 0.4) / 1.4

    def logit(b, h, i, j, q, k):
        lag = positions[b, i] - positions[b, j]
        faded = np.tile(zeta ** (lag / 3.0), 2)
        return (turned(q, positions[b, i]) * faded) @ turned(k, positions[b, j]) / math.sqrt(SIZE)

    np.testing.assert_allclose(out, attention(mixer, x, positions, packed, groups, logit), rtol=1e-6, atol=1e-9)


def test_fresh_gates_are_as_published_or_as_asked_for():
    shape = MixerShape(WIDTH, HEADS, HEADS, SIZE, layer=0, n_layer=2)
    for bias, fresh in ((0.0, 0.5), (3.0, 1 / (1 + math.exp(-3.0)))):
        gate = ForgettingAttention(shape, forget_bias=bias).forget
        torch.testing.assert_close(gate(torch.zeros(1, 1, WIDTH)).exp(), torch.full((1, HEADS, 1), fresh))
    torch.testing.assert_close(HeadGate(shape)(torch.randn(1, 3, WIDTH)), torch.ones(1, 3, HEADS))


@pytest.mark.parametrize("scale", [0.0, -512.0])
def test_xpos_refuses_modes_that_grow(scale):
    with pytest.raises(UserError, match=r"block\.scale"):
        XPosAttention(MixerShape(WIDTH, HEADS, HEADS, SIZE, layer=0, n_layer=2), scale=scale)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("groups", "packed"), CASES)
def test_forgetting_multiplies_the_gates_of_the_tokens_in_between(groups, packed, rope):
    mixer, x, positions, out, record = run(ForgettingAttention, groups, packed, rope=rope, forget_bias=1.0)
    gate = mixer.forget
    f = 1 / (1 + np.exp(-(x @ gate.weight.detach().numpy().T + gate.offset.detach().numpy())))  # (B, T, H)

    def logit(b, h, i, j, q, k):
        if rope:
            q, k = turned(q, positions[b, i]), turned(k, positions[b, j])
        return q @ k / math.sqrt(SIZE) + math.log(np.prod(f[b, j + 1 : i + 1, h]))

    np.testing.assert_allclose(out, attention(mixer, x, positions, packed, groups, logit), rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(record["log_forget"].exp(), f.transpose(0, 2, 1), rtol=1e-9)


@pytest.mark.parametrize(("groups", "packed"), CASES)
def test_ngpts_logits_are_scaled_cosines(groups, packed):
    mixer, x, positions, out, _ = run(NormalisedAttention, groups, packed)
    s = mixer.qk_scale.detach().numpy()[:, 0] * math.sqrt(WIDTH)

    def logit(b, h, i, j, q, k):
        q, k = turned(q, positions[b, i]), turned(k, positions[b, j])
        return math.sqrt(SIZE) * (s[h] * q / np.linalg.norm(q)) @ (s[h] * k / np.linalg.norm(k))

    np.testing.assert_allclose(out, attention(mixer, x, positions, packed, groups, logit), rtol=1e-7, atol=1e-10)
