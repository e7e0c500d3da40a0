"""Sampling's dials do what they say, and text comes out in order and complete."""

import pytest
import torch
import torch.nn.functional as F

from polarlm.data.probes import Permutations, Recall
from polarlm.data.tokenizer import ByteTokenizer
from polarlm.errors import UserError
from polarlm.evaluation import generate
from polarlm.evaluation.generate import Sampling, answered_example, filter_logits, sample_tokens, stream_text

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def kept(**options):
    return torch.isfinite(filter_logits(LOGITS, Sampling(**options))).nonzero().flatten().tolist()


def test_filters_keep_what_they_promise():
    p = LOGITS.softmax(-1)  # 0.644, 0.237, 0.087, 0.032, 0
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=float(p[0]) + 0.01) == [0, 1] and kept(top_p=0.01) == kept(top_p=1e-320) == [0]
    assert kept(min_p=0.1) == [0, 1, 2] and kept(min_p=1.0) == [0]
    assert kept(top_k=3, min_p=0.3) == [0, 1]
    assert torch.equal(filter_logits(LOGITS, Sampling(temperature=2.0)), LOGITS / 2)


def test_a_repetition_penalty_makes_seen_tokens_less_likely_on_both_sides_of_zero():
    changed = filter_logits(LOGITS, Sampling(repetition_penalty=2.0), before=[0, 3, 3])
    assert changed.tolist() == [1.0, 1.0, 0.0, -2.0, -30.0]
    assert torch.equal(filter_logits(LOGITS, Sampling(), before=[0]), LOGITS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_k": 0},
        {"top_p": 0},
        {"min_p": 2},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308},
    ],
)
def test_impossible_dials_are_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_cached_steps_write_what_reading_everything_again_would(model_of):
    model = model_of(257)
    written = list(sample_tokens(model, [65, 66], 10, Sampling(temperature=0)))
    text = [65, 66]
    for token in written:
        with torch.no_grad():
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)
    assert len(list(sample_tokens(model, [65], 50, Sampling(seed=1)))) == 50  # beyond the context of 16


def test_the_same_seed_writes_the_same_and_another_does_not(model_of):
    model = model_of(257)
    texts = ["".join(stream_text(model, ByteTokenizer(), "a", 30, Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def writes(monkeypatch):
    """Makes the model write given bytes."""

    def fix(text: bytes):
        monkeypatch.setattr(generate, "sample_tokens", lambda *a, **k: iter(text))

    return fix


def test_text_is_streamed_without_half_characters(writes):
    writes("naïve 北京".encode())
    pieces = list(stream_text(None, ByteTokenizer(), "x", 99))
    assert "".join(pieces) == "naïve 北京" and all("\ufffd" not in piece for piece in pieces)


def test_writing_ends_before_a_stop_string_of_which_nothing_is_shown(writes):
    writes(b"one END two")
    pieces = list(stream_text(None, ByteTokenizer(), "x", 99, stop=["END", "zzz"]))
    assert "".join(pieces) == "one " and not any("E" in piece for piece in pieces)
    writes(b"one EN two")
    assert "".join(stream_text(None, ByteTokenizer(), "x", 99, stop=["END"])) == "one EN two"


class AnswersAll(torch.nn.Module):
    """Knows every answer of a task but the last one asked for."""

    def __init__(self, task):
        super().__init__()
        self.task, self.embedding = task, torch.nn.Embedding(1, 1)

    def forward(self, tokens):
        right, asked = self.task.answers(tokens.numpy().copy())
        right[0, asked[0].nonzero()[0][-1]] = 2
        return F.one_hot(torch.from_numpy(right), len(self.task.words) + 5).float()


def test_an_example_of_a_task_shows_the_answers_and_what_a_wrong_one_should_have_been():
    task = Recall(length=12, pairs=2, keys=5)
    shown = answered_example(AnswersAll(task), task).split(" ")
    pairs = dict(zip(shown[0:4:2], shown[1:4:2], strict=True))
    asked = [symbol for symbol in shown[4:] if symbol != "."]
    assert len(shown) == 12 and len(asked) == 2 and "<" not in "".join(shown)
    key, _, answer = asked[0].partition("→")
    assert answer == pairs[key]
    key, _, answer = asked[1].partition("→")
    assert answer == f".({pairs[key]})"
    everywhere = answered_example(AnswersAll(Permutations(length=4)), Permutations(length=4)).split(" ")
    assert [symbol.count("→") for symbol in everywhere] == [1, 1, 1, 1]
    assert everywhere[0].split("→")[0] == everywhere[0].split("→")[1]  # the product of one is itself
