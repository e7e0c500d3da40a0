"""Published rivals equal their formulas, written down token by token."""

import numpy as np
import pytest
import torch

from polarlm.attention import MixerShape, StandardAttention, TokenContext
from polarlm.attention.element_gated import ElementGatedAttention
from polarlm.attention.fox_pro import ProForgettingAttention
from polarlm.geometry import rotary_tables

WIDTH, HEADS, GROUPS, SIZE, TOKENS = 12, 4, 2, 6, 7
DOCUMENTS = torch.tensor([[3, 3, 3, 1, 1, 1, 1]])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, gain):
    return x / np.sqrt((x**2).mean() + 1e-6) * gain


def numbers(mixer):
    return {name: value.detach().numpy() for name, value in mixer.named_parameters()}


def stirred(mixer):
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.double()


def run(mixer, x, documents):
    positions = torch.arange(TOKENS)
    rotary = rotary_tables(positions, SIZE, dtype=torch.float64)
    with torch.no_grad():
        return mixer(x, TokenContext(rotary, documents, positions=positions)).numpy()[0]


def parts(x, w):
    q, k, v = np.split(x @ w["qkv.weight"].T, [HEADS * SIZE, (HEADS + GROUPS) * SIZE], axis=1)
    return q.reshape(TOKENS, HEADS, SIZE), k.reshape(TOKENS, GROUPS, SIZE), v.reshape(TOKENS, GROUPS, SIZE)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_fox_pro_is_its_formula(documents):
    mixer = stirred(ProForgettingAttention(MixerShape(WIDTH, HEADS, GROUPS, SIZE, 0, 2)))
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    w, rows = numbers(mixer), x[0].numpy()
    ids = [0] * TOKENS if documents is None else documents[0].tolist()
    q, k, v = parts(rows, w)
    rates = sigmoid(rows @ w["shift_rates.weight"].T)
    shifted_k, shifted_v = np.zeros_like(k), np.zeros_like(v)
    for t in range(TOKENS):
        for g in range(GROUPS):
            inside = t > 0 and ids[t - 1] == ids[t]
            for source, target, rate in ((k, shifted_k, rates[t, g]), (v, shifted_v, rates[t, GROUPS + g])):
                target[t, g] = (1 - rate) * source[t, g] + (rate * source[t - 1, g] if inside else 0)
    gates = sigmoid(rows @ w["forget.weight"].T + w["forget.offset"])
    wanted = []
    for i in range(TOKENS):
        heads = []
        for h in range(HEADS):
            g, query = h // (HEADS // GROUPS), rms(q[i, h], w["q_norm.weight"])
            past = [j for j in range(i + 1) if ids[j] == ids[i]]
            raw = [
                np.exp(query @ rms(shifted_k[j, g], w["k_norm.weight"]) / SIZE**0.5) * gates[j + 1 : i + 1, h].prod()
                for j in past
            ]
            mean = sum(a * shifted_v[j, g] for a, j in zip(raw, past)) / sum(raw)
            heads.append(rms(mean, w["output_gain"][h, 0]))
        wanted.append(w["out.weight"] @ (np.concatenate(heads) * sigmoid(w["output_gate.weight"] @ rows[i])))
    np.testing.assert_allclose(run(mixer, x, documents), wanted, rtol=1e-6, atol=1e-8)


def test_the_element_gate_multiplies_every_channel_that_leaves_the_heads():
    shape = MixerShape(WIDTH, HEADS, GROUPS, SIZE, 0, 2)
    mixer, plain = stirred(ElementGatedAttention(shape, qk_norm=True)), StandardAttention(shape, qk_norm=True).double()
    plain.load_state_dict(mixer.state_dict(), strict=False)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    w, leaving = numbers(mixer), []
    plain.out.register_forward_hook(lambda module, given, made: leaving.append(given[0][0].numpy()))
    run(plain, x, None)
    wanted = (leaving[0] * sigmoid(x[0].numpy() @ w["output_gate.weight"].T)) @ w["out.weight"].T
    np.testing.assert_allclose(run(mixer, x, None), wanted, rtol=1e-9, atol=1e-12)
