"""Every protocol against a direct, slow computation: one forward pass per token."""

import math

import numpy as np
import pytest
import torch

from polarlm.errors import UserError
from polarlm.evaluation.breakdowns import (
    Reliability,
    calibration,
    loss_by_frequency,
    loss_by_position,
    losses_of_documents,
    position_edges,
)
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.robustness import (
    KINDS,
    corruption,
    loss_by_corruption,
    loss_by_length,
    shuffled_documents,
    shuffling_control,
)
from polarlm.evaluation.scores import read_text, score_text, window_spans

CONTEXT = 16


@pytest.fixture
def text(corpus_of):
    corpus = corpus_of("byte", documents=30)
    return read_text(corpus.store("val"), corpus.tokenizer, 230)


@pytest.fixture
def model(model_of):
    return model_of(257, context=CONTEXT)


def log_probabilities(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]))[0, -1].double().log_softmax(-1)


def naive(model, text, context, stride):
    """[(place, tokens before it, nats, entropy, correct)], straight from the definition of a sliding window."""
    result = []
    for place in range(1, len(text.tokens)):
        # The first window that reaches this token: window k reads [k stride, k stride + context).
        number = max(0, math.ceil((place - context) / stride))
        begin = number * stride
        logp = log_probabilities(model, text.tokens[begin:place])
        target = int(text.tokens[place])
        others = torch.cat([logp[:target], logp[target + 1 :]]).max()
        entropy = float(-(logp.exp() * logp).sum())
        result.append((place, place - begin, -float(logp[target]), entropy, bool(logp[target] > others)))
    return [np.array(column) for column in zip(*result)]


@pytest.mark.parametrize("stride", [1, 5, 8, 16])
def test_sliding_windows_score_every_token_once_with_the_promised_context(model, text, stride):
    scores = score_text(model, text, stride=stride)
    places, seen, nats, entropy, correct = naive(model, text, CONTEXT, stride)
    np.testing.assert_array_equal(scores.places, places)
    np.testing.assert_array_equal(scores.seen, seen)
    np.testing.assert_allclose(scores.nats, nats, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)
    np.testing.assert_array_equal(scores.correct, correct)
    assert (scores.seen >= np.minimum(scores.places, CONTEXT - stride + 1)).all()
    assert measure(scores.tally(text))["loss"] == pytest.approx(nats.mean(), abs=1e-5)


def test_a_stride_beyond_the_context_would_leave_tokens_out_and_is_refused():
    assert window_spans(10, 4, 2) == [(0, 1, 5), (2, 5, 7), (4, 7, 9), (6, 9, 10)]
    with pytest.raises(UserError, match="stride=5"):
        window_spans(10, 4, 5)


def test_closed_documents_are_scored_from_their_own_beginning(model, text):
    scores = score_text(model, text, mask_documents=True)
    assert not set(scores.places) & set(text.starts.tolist())
    looked_at = 0
    for place, nats, seen in zip(scores.places, scores.nats, scores.seen):
        begin, window = text.starts[text.document_of(np.array([place]))[0]], (place - 1) // CONTEXT * CONTEXT
        if begin > window:  # the window also holds tokens of the document before, which must have no say
            expected = -log_probabilities(model, text.tokens[begin:place])[text.tokens[place]]
            assert nats == pytest.approx(float(expected), abs=2e-5)
            assert seen == place - begin
            looked_at += 1
    assert looked_at >= 5


def test_loss_by_position_is_the_mean_of_the_tokens_at_that_position(model, text):
    scores = score_text(model, text)
    curve = loss_by_position(scores, CONTEXT)
    assert position_edges(CONTEXT).tolist() == [1, 2, 3, 4, 6, 8, 12, 17]  # 16 is not a bin of its own
    assert position_edges(1).tolist() == [1, 2] and position_edges(2).tolist() == [1, 3]
    for low, high, loss, count in zip(curve["from"], curve["to"], curve["loss"], curve["targets"]):
        chosen = [n for n, seen in zip(scores.nats, scores.seen) if low <= seen <= high]
        assert (len(chosen), np.mean(chosen)) == (count, pytest.approx(loss))
    assert sum(curve["targets"]) == len(scores.nats)


def test_loss_by_frequency_sorts_targets_by_their_count_in_the_training_text(model, text):
    scores = score_text(model, text)
    counts = np.bincount(np.array([5] * 9 + [6] * 10 + [int(text.tokens[3])] * 1000), minlength=257)
    curve = loss_by_frequency(scores, counts)
    for low, high, loss, count in zip(curve["from"], curve["to"], curve["loss"], curve["targets"]):
        chosen = [n for n, t in zip(scores.nats, scores.targets) if low <= counts[t] <= high]
        assert (len(chosen), np.mean(chosen)) == (count, pytest.approx(loss))
    assert curve["from"] == [0, 1000] and curve["to"] == [0, 9999]


def test_length_reads_the_same_targets_in_longer_windows(model, text):
    result = loss_by_length(model, text, [1, 2, 4, 64])
    assert result["factor"] == [1, 2, 4]  # 64 × 16 is longer than the text
    for context, metrics in zip(result["context"], result["metrics"]):
        _, _, nats, _, _ = naive(model, text, context, context)
        assert metrics["loss"] == pytest.approx(nats.mean(), abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_corruption_changes_what_is_read_at_the_rate_asked_for(text, kind):
    tokens = np.arange(1000, 11000)
    assert (corruption(kind, 0.0, text, 0)(tokens) == tokens).all()
    changed = corruption(kind, 0.3, text, 0)(tokens)
    assert 0.25 < (changed != tokens).mean() < 0.35
    if kind == "shuffled":
        assert sorted(changed) == tokens.tolist()
    if kind == "repeated":
        moved = np.flatnonzero(changed != tokens)
        assert (changed[moved] == tokens[moved - 1]).all()
    np.testing.assert_array_equal(changed, corruption(kind, 0.3, text, 0)(tokens))


def test_the_loss_under_corruption_is_that_of_true_targets_after_wrong_tokens(model, text):
    result = loss_by_corruption(model, text, ["random"], [0.0, 0.4], seed=3)
    plain = score_text(model, text)
    assert result["random"]["loss"][0] == pytest.approx(plain.nats.mean())
    assert result["random"]["loss_after_clean_token"][0] == pytest.approx(plain.nats.mean())
    corrupt = corruption("random", 0.4, text, 3)
    nats, clean = [], []
    for begin, _, end in window_spans(len(text.tokens), CONTEXT, CONTEXT):
        read = corrupt(text.tokens[begin : end - 1])
        for index in range(len(read)):
            nats.append(-float(log_probabilities(model, read[: index + 1])[text.tokens[begin + index + 1]]))
            clean.append(read[index] == text.tokens[begin + index])
    assert result["random"]["loss"][1] == pytest.approx(np.mean(nats), abs=2e-5)
    assert result["random"]["loss_after_clean_token"][1] == pytest.approx(np.mean(np.array(nats)[clean]), abs=2e-5)


def test_shuffled_documents_keep_their_tokens_and_the_control_says_whether_the_gain_is_gone(model, text):
    mixed = shuffled_documents(text, seed=1)
    for begin, end in zip(text.starts, [*text.starts[1:], len(text.tokens)]):
        assert sorted(mixed.tokens[begin:end]) == sorted(text.tokens[begin:end])
    assert (mixed.tokens != text.tokens).mean() > 0.5
    loss = score_text(model, mixed).nats.mean()
    assert shuffling_control(model, text, loss - 0.01, seed=1)["passed"]
    assert not shuffling_control(model, text, loss + 0.01, seed=1)["passed"]


def test_calibration_equals_a_count_by_hand(model, text):
    result = calibration(model, text)
    predictions, top = [], []
    for place in range(1, len(text.tokens)):
        begin = (place - 1) // CONTEXT * CONTEXT
        p = log_probabilities(model, text.tokens[begin:place]).exp().tolist()
        target = int(text.tokens[place])
        predictions += [(value, token == target) for token, value in enumerate(p)]
        best = max(range(len(p)), key=p.__getitem__)
        top.append((p[best], best == target))
    targets = len(text.tokens) - 1

    def error(pairs, edges):
        gaps = np.zeros(len(edges) + 1)
        for p, hit in pairs:
            gaps[np.searchsorted(edges, p)] += hit - p
        return np.abs(gaps).sum() / targets

    assert result["ece"] == pytest.approx(error(top, np.arange(1, 15) / 15), abs=1e-4)
    assert result["full_ece"] == pytest.approx(error(predictions, 10.0 ** (np.arange(-32, 1) / 4)), abs=1e-3)
    assert sum(result["reliability_full"]["predictions"]) == targets * 257
    assert result["confidence"] == pytest.approx(np.mean([p for p, _ in top]), abs=1e-5)


def test_a_calibrated_coin_has_no_error_and_an_overconfident_one_has():
    reliability = Reliability(torch.arange(1, 10, dtype=torch.float64) / 10)
    reliability.add(torch.full((1000,), 0.25), torch.arange(1000) % 4 == 0)
    assert reliability.gap() == pytest.approx(0.0)
    reliability.add(torch.full((1000,), 0.95), torch.arange(1000) % 2 == 0)
    assert reliability.gap() / 1000 == pytest.approx(0.45)


def test_the_losses_of_documents_add_up_to_the_texts(model, text):
    from polarlm.data.tokenizer import ByteTokenizer

    scores = score_text(model, text)
    result = losses_of_documents(scores, text, ByteTokenizer())
    assert len(result["nats"]) == len(text.starts)
    assert result["nats"].sum() == pytest.approx(scores.nats.sum())
    assert result["targets"].sum() == len(scores.nats) and result["tokens"].sum() == len(text.tokens)
    second = scores.places >= text.starts[1]
    assert result["nats"][1] == pytest.approx(scores.nats[second].sum())
    assert result["bytes"].sum() == pytest.approx(text.size.bytes, abs=3)
