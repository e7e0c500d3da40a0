"""Correlations of magnitude and evidence with loss and entropy, against scipy on values collected by hand."""

import numpy as np
import pytest
import torch
from scipy import stats

from polarlm.attention import PolarAttention
from polarlm.diagnostics.probe import confidence, correlation_or_none
from polarlm.evaluation.metrics import TextSize
from polarlm.evaluation.scores import Text
from polarlm.model import GPT, GPTConfig


def test_correlations_are_those_of_the_records():
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=30, context=8, d_model=16, n_layer=2, n_head=2), PolarAttention).eval()
    with torch.no_grad():
        model.embedding.weight.normal_(std=0.5)
    tokens = np.random.default_rng(0).integers(30, size=81)
    result = confidence(model, Text(tokens, np.array([0]), TextSize(81, 81, 81, 9)))

    loss, entropy, evidence, magnitude = [], [], [], []
    for begin in range(0, 80, 8):
        record = []
        with torch.no_grad():
            logp = model(torch.from_numpy(tokens[None, begin : begin + 8]), record=record)[0].log_softmax(-1)
        loss += (-logp[torch.arange(8), torch.from_numpy(tokens[begin + 1 : begin + 9])]).tolist()
        entropy += (-(logp.exp() * logp).sum(-1)).tolist()
        evidence += record[1]["log_evidence"][0].mean(0).tolist()
        magnitude += record[1]["magnitude"][0].log().tolist()
    assert result["targets"] == 80
    for name, values in (("magnitude", magnitude), ("log_evidence", evidence)):
        for outcome, other in (("loss", loss), ("entropy", entropy)):
            got = result[f"{name}_{outcome}"]
            assert got["pearson"][1] == pytest.approx(stats.pearsonr(values, other).statistic, abs=1e-4)
            assert got["spearman"][1] == pytest.approx(stats.spearmanr(values, other).statistic, abs=5e-3)


def test_what_does_not_vary_has_no_correlation():
    assert correlation_or_none(stats.pearsonr, np.ones(5), np.arange(5.0)) is None
