"""Counting on a text equals a slow count of every token by itself, whole or in part."""

import itertools
import math

import pytest
import torch

from polarlm.data.module import EvalBatches, EvalLoader
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.scores import text_size
from polarlm.training.module import evaluate_split


def slow_count(model, ids, context):
    """Every token but the first, one forward pass each: (nats, hits)."""
    nats, hits = 0.0, 0
    for place in range(1, len(ids)):
        begin = (place - 1) // context * context
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:place]]))[0, -1].double()
        nats -= logits.log_softmax(-1)[ids[place]].item()
        others = logits.clone()
        others[ids[place]] = -math.inf
        hits += bool(logits[ids[place]] > others.max())
    return nats, hits


def test_counts_equal_a_forward_pass_per_token(corpus_of, model_of):
    corpus = corpus_of("byte", documents=20)
    store = corpus.store("val")
    model = model_of(corpus.tokenizer.vocab_size)
    counted = evaluate_split(model, EvalLoader(EvalBatches(store, 16, 3), corpus, None))
    nats, hits = slow_count(model, store[:].astype(int).tolist(), 16)
    assert counted.targets == len(store) - 1
    assert counted.nats == pytest.approx(nats, rel=1e-6)
    assert counted.correct == hits and hits > 0


def test_the_sum_has_the_same_bits_as_the_loss_of_training(corpus_of, model_of):
    corpus = corpus_of("bpe")
    model = model_of(corpus.tokenizer.vocab_size)
    for batch in EvalBatches(corpus.store("val"), 16, 8):
        nats, _ = model.tally(batch["tokens"], batch["targets"])
        assert nats == model.loss(batch["tokens"], batch["targets"], reduction="sum")


def test_a_model_without_an_opinion_is_never_right(corpus_of, model_of):
    corpus = corpus_of("byte", documents=20)
    model = model_of(corpus.tokenizer.vocab_size, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight.zero_()
    store = corpus.store("val")
    counted = evaluate_split(model, EvalLoader(EvalBatches(store, 16, 3), corpus, None))
    assert counted.correct == 0
    assert measure(counted)["loss"] == pytest.approx(math.log(corpus.tokenizer.vocab_size))


def test_a_model_in_training_is_counted_without_dropout_and_goes_on_training(corpus_of, model_of):
    corpus = corpus_of("byte", documents=20)
    store = corpus.store("val")
    model = model_of(corpus.tokenizer.vocab_size, dropout=0.5)
    loader = EvalLoader(EvalBatches(store, 16, 3), corpus, None)
    still = evaluate_split(model, loader)
    assert evaluate_split(model.train(), loader) == still and model.training


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_the_size_of_a_text_is_that_of_the_text(corpus_of, kind):
    corpus = corpus_of(kind)
    store, tokenizer = corpus.store("val"), corpus.tokenizer
    starts = [*store.document_starts(0, len(store)).tolist(), len(store)]
    ids = [store[a:b].tolist() for a, b in itertools.pairwise(starts)]
    texts = [tokenizer.decode([i for i in document if i != tokenizer.eos_id]) for document in ids]
    size = text_size(store, tokenizer)
    assert size.tokens == len(store)
    assert size.bytes == store.bytes == sum(len(t.encode()) for t in texts)
    assert size.characters == sum(map(len, texts)) < size.bytes
    assert size.words == sum(len(t.split()) for t in texts)


def test_words_of_a_tokenizer_that_forgets_are_still_counted_as_read(corpus_of):
    corpus = corpus_of("word")
    size = text_size(corpus.store("val"), corpus.tokenizer)
    assert size.bytes == corpus.store("val").bytes


def test_part_of_a_split_is_measured_with_its_own_bytes(tmp_path):
    from polarlm.data import build_corpus

    # The beginning is ASCII (1 byte per character), the end is Chinese (3 bytes): the mean fits neither.
    path = tmp_path / "two_halves.txt"
    path.write_text("x" * 100 + "a" * 1000 + "京" * 1000, encoding="utf-8")
    corpus = build_corpus(
        {"path": str(path), "split": {"rule": "position", "val": 0.95}, "append_eos": False},
        {"kind": "char"},
        tmp_path / "cache",
    )
    store = corpus.store("val")
    part = text_size(store, corpus.tokenizer, 500)
    assert part.tokens == part.bytes == part.characters == 500
    assert store.bytes_per_token > 1.5


def test_part_of_a_split_is_judged_with_that_parts_bytes(corpus_of, model_of):
    from polarlm.data import LMDataModule

    corpus = corpus_of("byte")
    model = model_of(corpus.tokenizer.vocab_size)
    data = LMDataModule(corpus, context=16, micro_batch=4, seed=1, eval_tokens=333)
    logged = measure(evaluate_split(model, data.eval_dataloader("val")))
    text = text_size(corpus.store("val"), corpus.tokenizer, 333)
    assert logged["bits_per_byte"] == pytest.approx(logged["loss"] / math.log(2) * 333 / text.bytes, rel=1e-12)
    assert text.bytes / 333 != corpus.store("val").bytes_per_token
