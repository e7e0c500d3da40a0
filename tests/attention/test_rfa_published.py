"""RFA as published equals its formulas, written down pair by pair, and its decay rates are those of the spectrum."""

import cmath
import math

import numpy as np
import pytest
import torch

from polarlm.attention import MixerShape, TokenContext
from polarlm.attention.rfa_published import PublishedFilterAttention, coupled_rates
from polarlm.geometry import rotary_tables

WIDTH, HEADS, SIZE, TOKENS, BASE = 12, 4, 6, 7, 100.0


def by_pairs(x, weights, p, groups, speeds, subtract):
    """delta_i = sum_j softmax_j(beta L_ij) E_ij e^{-i w (i - j)} v_j - v_i, then W_o; L as in the appendix."""
    modes, out = SIZE // 2, []
    qkv = x @ weights["qkv"].T
    parts = np.split(qkv, [HEADS * SIZE, (HEADS + groups) * SIZE], axis=1)
    q, k, v = (part.reshape(TOKENS, -1, SIZE) for part in parts)
    q, k, v = (part[..., :modes] + 1j * part[..., modes:] for part in (q, k, v))
    for i in range(TOKENS):
        heads = []
        for h in range(HEADS):
            g, logits, said = h // (HEADS // groups), [], []
            mu, nu = p["mu"][h], p["nu"][h]
            for j in range(i + 1):
                lag = i - j
                turn = np.array([cmath.exp(-1j * w * lag) for w in speeds[g]])
                fade = math.exp(-mu * lag)
                gathered = 0.0 if mu == 0 else p["process"][h] * (1 - fade**2)
                variance = gathered + p["eta2"][h] * fade**2 + p["gamma2"][h]
                distance = (abs(q[i, h] - fade * turn * k[j, g]) ** 2).sum() / variance
                logits.append(p["beta"][h] * (-math.log(variance) - (nu + 1) * math.log(1 + distance / (nu * modes))))
                said.append(fade * turn * v[j, g])
            share = np.exp(np.array(logits) - max(logits))
            mean = (share[:, None] * np.array(said)).sum(0) / share.sum() - subtract * v[i, g]
            heads.append(np.concatenate([mean.real, mean.imag]))
        out.append(weights["out"] @ np.concatenate(heads))
    return np.array(out)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("frequencies", ["shared", "per_head"])
def test_published_rfa_is_its_formula(groups, subtract, frequencies):
    shape = MixerShape(WIDTH, HEADS, groups, SIZE, 0, 2, rope_base=BASE)
    beta = [0.5, 1.0, 1.3, 2.0]
    mixer = PublishedFilterAttention(
        shape, damping=0.4, subtract_value=subtract, frequencies=frequencies, inverse_temperature=beta, nu=[1, 2, 4, 9]
    ).double()
    positions = torch.arange(TOKENS)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    context = TokenContext(rotary_tables(positions, SIZE, BASE, dtype=torch.float64), positions=positions)
    modes = SIZE // 2
    own = BASE ** (-np.arange(modes) / modes)
    bank = np.sort(BASE ** (-np.arange(groups * modes) / (groups * modes))).reshape(groups, modes)
    rates = 0.4 * np.repeat(bank.max(1), HEADS // groups)
    rates[0] = 0  # a quarter of the heads
    ones = np.ones(HEADS)
    p = {"mu": rates, "nu": [1, 2, 4, 9], "process": 0.1 * ones, "eta2": ones, "gamma2": ones, "beta": beta}
    weights = {"qkv": mixer.qkv.weight.detach().numpy(), "out": mixer.out.weight.detach().numpy()}
    speeds = bank if frequencies == "per_head" else [own] * groups
    with torch.no_grad():
        actual = mixer(x, context).numpy()[0]
    wanted = by_pairs(x[0].numpy(), weights, p, groups, speeds, subtract)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())  # scalars are kept in fp32


def test_a_damping_of_5_reaches_the_fast_heads_of_the_published_model():
    shape = MixerShape(256, 8, 8, 64, 0, 6)
    wanted = [5 * 10_000 ** (-(7 - head) / 8) for head in range(8)]
    assert coupled_rates(shape, 5.0, undamped=False).tolist() == pytest.approx(wanted)
    assert coupled_rates(shape, 5.0, undamped=True).tolist() == pytest.approx([0, 0, *wanted[2:]])


def test_decay_rates_stay_while_the_inverse_temperature_learns():
    mixer = PublishedFilterAttention(MixerShape(WIDTH, HEADS, HEADS, SIZE, 0, 2))
    learned = {name for name, _ in mixer.named_parameters()}
    assert "inverse_temperature.raw" in learned and "estimator.mu.raw" not in learned
