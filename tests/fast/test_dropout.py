"""Dropout acts on the applied weights alone: scaled, drawn anew for every pair, unseen by evidence and records."""

import dataclasses

import pytest
import torch

from polarlm.attention.robust import robust_attention, streaming
from tests.fast.cases import make_case

KEYS, P = 16, 0.25


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", 4)


def call(**options):
    """Values that are unit vectors, so that the estimate of a query is the row of applied weights itself."""
    case = make_case(batch=3, heads=4, groups=4, queries=KEYS, size=KEYS)
    units = torch.eye(KEYS, dtype=torch.float64).expand(3, 4, KEYS, KEYS)
    return dataclasses.replace(case.call(kernel="student", **options), v=units)


@pytest.mark.parametrize("backend", ["reference", "native", "streaming"])
def test_a_weight_is_dropped_or_scaled_up(backend):
    plain = call()
    weights = robust_attention(plain, "reference").v_bar
    applied = robust_attention(dataclasses.replace(plain, dropout=P), backend).v_bar
    seen = weights > 1e-12
    kept = applied[seen] != 0
    torch.testing.assert_close(applied[seen][kept], weights[seen][kept] / (1 - P))
    assert abs(kept.double().mean() - (1 - P)) < 0.05


@pytest.mark.parametrize("backend", ["reference", "native", "streaming"])
def test_every_chunk_row_and_head_draws_its_own_mask(backend):
    applied = robust_attention(dataclasses.replace(call(), dropout=P), backend).v_bar
    # The first four keys are seen by every query from the fourth on, in chunks of four queries.
    masks = (applied[:, :, 4:, :4] != 0).unflatten(2, (-1, 4)).flatten(-2)  # (B, H, chunk, 16)
    drawn = {tuple(mask) for mask in masks.flatten(0, 2).tolist()}
    assert len(drawn) > 0.9 * masks[..., 0].numel()


def test_weights_that_are_handed_out_and_evidence_know_nothing_of_it():
    plain = call(return_weights=True)
    expected = robust_attention(plain, "reference")
    dropped = robust_attention(dataclasses.replace(plain, dropout=P), "reference")
    assert torch.equal(dropped.weights.directional, expected.weights.directional)
    assert torch.equal(dropped.log_evidence, expected.log_evidence)
    assert not torch.equal(dropped.v_bar, expected.v_bar)
