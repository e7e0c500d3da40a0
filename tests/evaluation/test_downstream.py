"""Minimal pairs, last words and rolling texts: against direct computation, and against lm-evaluation-harness."""

import json
import lzma
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from polarlm.data import atomic
from polarlm.data.tokenizer import ByteTokenizer
from polarlm.errors import UserError
from polarlm.evaluation import downstream
from polarlm.evaluation.downstream import (
    blimp,
    encode_pair,
    lambada,
    likelihoods,
    read_rows,
    roll_documents,
    rolling_windows,
    task_file,
)
from polarlm.evaluation.harness import generate_answer
from polarlm.evaluation.metrics import Tally, TextSize, measure
from polarlm.evaluation.scores import Text

TOKENIZER = ByteTokenizer()
PAIRS = [
    {"sentence_good": "The cat sits.", "sentence_bad": "The cat sit.", "UID": "agreement"},
    {"sentence_good": "Cats sit.", "sentence_bad": "Cats sits.", "UID": "agreement"},
    {"sentence_good": "Who left?", "sentence_bad": "Who left?", "UID": "tie"},
]
PASSAGES = [{"text": "He saw the red car and drove the car"}, {"text": "One two three, one two three"}]


def by_hand(model, context, continuation):
    """Σ ln p and greediness of ids after ids, one forward pass per token."""
    text, nats, greedy = list(context), 0.0, True
    for token in continuation:
        with torch.no_grad():
            logp = model(torch.tensor([text]))[0, -1].double().log_softmax(-1)
        nats += float(logp[token])
        greedy &= int(logp.argmax()) == token
        text.append(token)
    return nats, greedy


@pytest.fixture
def model(model_of):
    return model_of(257, context=64)


def test_likelihoods_equal_a_pass_per_token_whatever_stands_beside_them(model):
    texts = [("", "abc"), ("a", "b"), ("Some words ", "more"), ("x" * 20, "yz" * 15)]
    pairs = [encode_pair(TOKENIZER, *text) for text in texts]
    assert pairs[0][0] == [256] and pairs[2] == (list(b"Some words"), list(b" more"))
    for pair, result in zip(pairs, likelihoods(model, pairs)):
        nats, greedy = by_hand(model, *pair)
        assert result.nats == pytest.approx(nats, abs=1e-4) and result.greedy == greedy
    best = int(model(torch.tensor([[65]]))[0, -1].argmax())
    assert likelihoods(model, [([65], [best])])[0].greedy


def test_what_is_too_long_loses_its_beginning(model):
    (result,) = likelihoods(model, [(list(range(100)), [5, 6])])
    assert result.nats == pytest.approx(by_hand(model, list(range(100))[-63:], [5, 6])[0], abs=1e-4)


def test_in_a_minimal_pair_a_tie_is_wrong(model):
    result = blimp(model, TOKENIZER, PAIRS)
    right = [
        by_hand(model, [256], row["sentence_good"].encode())[0] > by_hand(model, [256], row["sentence_bad"].encode())[0]
        for row in PAIRS[:2]
    ]
    assert result["accuracy"] == pytest.approx(sum(right) / 3)
    assert dict(zip(*result["paradigms"].values())) == {"agreement": sum(right) / 2, "tie": 0.0}


def test_the_last_word_is_scored_with_its_space(model):
    result = lambada(model, TOKENIZER, PASSAGES)
    cut = [passage["text"].rpartition(" ") for passage in PASSAGES]
    nats = [by_hand(model, before.encode(), f" {word}".encode()) for before, _, word in cut]
    assert result["target_log_likelihood"] == pytest.approx(sum(n for n, _ in nats) / 2, abs=1e-4)
    assert result["accuracy"] == sum(greedy for _, greedy in nats) / 2


def test_rolling_windows_score_every_token_once():
    result = list(rolling_windows(list(range(10)), 99, 4))
    assert result == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]


def test_the_harness_gets_greedy_answers_unless_a_task_samples(model):
    def answer(**options):
        return generate_answer(model, TOKENIZER, "One two", {"max_gen_toks": 12, **options})

    ids = list(b"One two")
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    greedy = TOKENIZER.decode(ids[len(b"One two") :])
    # A temperature without do_sample is the harness's default for greedy tasks.
    assert answer() == answer(temperature=2.0) == answer(do_sample=False, temperature=2.0) == greedy
    assert answer(do_sample=True, temperature=2.0) != greedy
    assert answer(until=[greedy[-1]]) == greedy[: greedy.index(greedy[-1])]


def test_local_files_are_found_or_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLARLM_SHARED_DATA", str(tmp_path))
    with pytest.raises(UserError, match="POLARLM_SHARED_DATA"):
        task_file("nothing.jsonl")
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(10)))
    assert [row["n"] for row in read_rows(task_file("some.jsonl"), 5)] == [0, 2, 4, 6, 8]


def test_a_packed_file_of_a_task_does_not_expand_without_end(monkeypatch, tmp_path):
    path = tmp_path / "task.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"n": 1}\n' * 200_000))
    assert len(read_rows(path)) == 200_000  # 1.8 MB in a few hundred bytes
    monkeypatch.setattr(atomic, "ALWAYS_ALLOWED", 1 << 20)
    with pytest.raises(UserError, match=r"task\.jsonl\.xz has .* expands to at least 1\.0 MB"):
        read_rows(path)


@pytest.mark.slow
def test_the_harness_finds_the_same_numbers(model, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    from polarlm.evaluation.harness import run_tasks

    (tmp_path / "lambada").mkdir()
    for name, rows in (("blimp_dev.jsonl.xz", PAIRS), ("lambada/lambada_dev.jsonl", PASSAGES)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if name.endswith(".xz"):
            import lzma

            (tmp_path / name).write_bytes(lzma.compress(text.encode()))
        else:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(downstream, "local_copy", lambda name: tmp_path / name)
    # A task as the harness has it for WikiText: whole pages, word perplexity and bits per byte.
    page = "A page of text , with words in it , longer than one @-@ off window of the model is : sixty @,@ four .\n"
    pages = [page * 2, "Short."]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    (tmp_path / "own").mkdir()
    task = {
        "task": "pages", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood_rolling",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "pages.jsonl")}, "cache_dir": str(tmp_path / "c")},
        "doc_to_text": "", "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    }  # fmt: skip
    (tmp_path / "own" / "pages.yaml").write_text(yaml.safe_dump(task))
    # And the harness's own task `wikitext` (its detokenizer, its way of counting) on these pages: no download.
    import lm_eval.tasks.wikitext.preprocess_wikitext as theirs

    wikitext = {
        "include": str(Path(theirs.__file__).with_name("wikitext.yaml")), "task": "wikitext_here",
        "dataset_path": "json", "dataset_name": None, "training_split": None, "validation_split": None,
        "dataset_kwargs": task["dataset_kwargs"],
    }  # fmt: skip
    (tmp_path / "own" / "wikitext_here.yaml").write_text(yaml.safe_dump(wikitext))
    result = run_tasks(model, TOKENIZER, ["blimp", "lambada", "pages", "wikitext_here"], include=tmp_path / "own")
    assert result["blimp"]["acc"] == pytest.approx(blimp(model, TOKENIZER, PAIRS)["accuracy"])
    ours = lambada(model, TOKENIZER, PASSAGES)
    assert result["lambada"]["acc"] == ours["accuracy"]
    assert result["lambada"]["perplexity"] == pytest.approx(ours["target_perplexity"], rel=1e-4)

    def nats_of(texts):
        windows = [w for text in texts for w in rolling_windows(list(text.encode()), 256, 64)]
        return -sum(by_hand(model, *window)[0] for window in windows)

    nats = nats_of(pages)
    size = len("".join(pages).encode())
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    metrics = measure(Tally(nats=nats, targets=size, text=TextSize(size, size, size, words)))
    assert result["pages"]["bits_per_byte"] == pytest.approx(metrics["bits_per_byte"], rel=1e-5)
    assert result["pages"]["word_perplexity"] == pytest.approx(metrics["word_perplexity"], rel=1e-4)
    assert math.log2(result["pages"]["byte_perplexity"]) == pytest.approx(metrics["bits_per_byte"], rel=1e-5)
    clean = [theirs.wikitext_detokenizer({"page": page}) for page in pages]
    assert "one-off" in clean[0] and len(clean[0]) < len(pages[0])
    metrics = measure(Tally(nats=nats_of(clean), targets=size, text=TextSize(size, size, size, words)))
    for name in ("bits_per_byte", "word_perplexity"):
        assert result["wikitext_here"][name] == pytest.approx(metrics[name], rel=1e-4)
    # And our own protocol, on the same pages as documents of a text.
    tokens = np.frombuffer("".join(pages).encode(), np.uint8).astype(np.int64)
    starts = np.array([0, len(pages[0].encode())])
    rolled = measure(roll_documents(model, Text(tokens, starts, TextSize(size, size, size, words)), TOKENIZER))
    assert rolled["bits_per_byte"] == pytest.approx(result["pages"]["bits_per_byte"], rel=1e-5)
    assert rolled["word_perplexity"] == pytest.approx(result["pages"]["word_perplexity"], rel=1e-4)
