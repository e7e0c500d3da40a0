"""Every number of the probe against a float64 recomputation from the weights that shares no code with it.

The bound is relative, 2e-4; a number below 0.01 in size is held to 2e-6. The probed model itself runs in fp32.
"""

from functools import partial

import numpy as np
import pytest
import torch

from polarlm.attention import ExclusiveAttention, PolarAttention, RobustFilterAttention, StandardAttention
from polarlm.diagnostics import run_probe
from polarlm.model import GPT, GPTConfig
from tests.diagnostics.expected import LAGS, expected_profiles, expected_values
from tests.diagnostics.naive import forward, rms

BOUND = 1e-4
BLOCKS = {
    "standard": (StandardAttention, None),
    "standard_rotated_grouped": (partial(StandardAttention, rotate_values=True), 2),
    "xsa": (ExclusiveAttention, None),
    "rfa": (RobustFilterAttention, None),
    "rfa_grouped": (RobustFilterAttention, 2),
    "polar": (PolarAttention, None),
    "polar_paper": (partial(PolarAttention, projection="evidence", radial="own"), None),
    "polar_global": (partial(PolarAttention, projection="global", radial="own", alpha=0.7), None),
}


def small_model(mixer, n_kv_head=None, context=16, d_model=32):
    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "context": context, "d_model": d_model, "n_layer": 2, "n_head": 4}
    model = GPT(GPTConfig(**sizes, n_kv_head=n_kv_head), mixer)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # fresh weights are so small that every quantity would be trivial
            torch.nn.init.normal_(parameter, std=1.4 * d_model**-0.5 if "embedding" not in name else 1.0)
    return model


@pytest.fixture(scope="module", params=BLOCKS)
def case(request):
    """(probe, values, profiles, layers): what was found, and what should have been."""
    model = small_model(*BLOCKS[request.param])
    # Few different tokens: twins are equal in the first layer, where rounding must not tell them apart.
    tokens = torch.randint(0, 7, (2, 9), generator=torch.Generator().manual_seed(6))
    layers, loss = forward(model, tokens)
    return run_probe(model, tokens), expected_values(layers, loss), expected_profiles(layers), layers


def errors(actual, wanted):
    """Largest error of every name, relative to what is wanted (to 0.01 when that is smaller)."""
    off = {}
    for name, value in wanted.items():
        value, seen = np.asarray(value, float), np.asarray(actual[name], float)
        assert seen.shape == value.shape, name
        off[name] = float((np.abs(seen - value) / np.maximum(0.01, np.abs(value))).max())
    return off


def beyond(errors):
    return {name: error for name, error in errors.items() if not error <= BOUND}


def test_every_name_has_a_recomputation_and_nothing_is_missing(case):
    probe, values, profiles, _ = case
    assert set(probe.values) == set(values)
    assert set(probe.profiles) == set(profiles)


def test_every_value_agrees(case):
    probe, values, _, _ = case
    assert beyond(errors(probe.values, values)) == {}


def test_every_lag_profile_agrees(case):
    probe, _, profiles, _ = case
    assert all(profile["x"] == list(LAGS) for profile in probe.profiles.values())
    actual = {name: profile["y"] for name, profile in probe.profiles.items()}
    assert beyond(errors(actual, profiles)) == {}


def test_every_histogram_agrees(case):
    probe, _, _, layers = case
    samples = {
        "radial/magnitude": [s.m for s in layers],
        "radial/residual_rms": [rms(s.out) for s in layers],
        "precision/log_evidence": [s.evidence for s in layers],
    }
    assert set(probe.histograms) == set(samples)
    for name, wanted in samples.items():
        for actual, sample in zip(probe.histograms[name], wanted, strict=True):
            counts, edges = np.histogram(sample, bins=len(actual.counts))
            assert actual.counts == counts.tolist(), name
            assert beyond(errors({name: actual.edges}, {name: edges})) == {}


@pytest.mark.parametrize("block", ["standard", "xsa", "rfa", "polar"])
def test_long_sequences_lose_no_digits(block):
    model = small_model(*BLOCKS[block], context=256, d_model=64)
    tokens = torch.randint(0, 40, (4, 256), generator=torch.Generator().manual_seed(3))
    single, double = run_probe(model, tokens), run_probe(model.double(), tokens)
    assert beyond(errors(single.values, double.values)) == {}
