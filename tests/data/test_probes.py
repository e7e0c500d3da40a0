"""The synthetic tasks: answers are right by an independent oracle, splits are disjoint, everything is a function."""

from collections import Counter
from functools import partial
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.data.probes import PROBES, Permutations, ProbeTask, Recall
from polarlm.errors import UserError
from polarlm.evaluation.breakdowns import ngram_losses
from polarlm.ignored import IGNORED
from polarlm.launch.corpora import data_settings

SMALL = {"examples": 300, "eval_examples": 40}
TASKS: dict[str, dict[str, Any]] = {
    "mqar": {"length": 64, "pairs": 4},
    "mqar longer": {"length": 128, "pairs": 8},
    "mqar longest": {"length": 256, "pairs": 16},
    "mqar tight": {"length": 33, "pairs": 8, "keys": 8},
    "permutations": {"length": 24, "group": "S3"},
    "permutations of 5": {"length": 24, "group": "S5"},
    "permutations even": {"length": 20, "group": "A5"},
    "copying": {"length": 48, "remembered": 6, "symbols": 5},
    "copying tight": {"length": 16, "remembered": 8},
    "induction": {"length": 32},
}


def corpus_of(task: str, cache: Path, **options: Any) -> Corpus:
    kind = task.split()[0]
    data = {"name": kind, "source": kind, kind: {**SMALL, **TASKS[task], **options}, "split": {"rule": "own"}}
    return build_corpus(data | {"append_eos": False}, {"kind": "word", "min_frequency": 1}, cache)


def recall_oracle(symbols: list[str]) -> list[str | None]:
    """Read the pairs into a dictionary; a key that comes again asks for its value."""
    known: dict[str, str] = {}
    wanted: list[str | None] = []
    for before, symbol in zip(["", *symbols], symbols):
        if symbol.startswith("v"):
            known[before] = symbol
        wanted.append(known.get(symbol))
    return wanted


def permutation_oracle(symbols: list[str]) -> list[str | None]:
    """Move things about, one symbol after the other."""
    places = list(range(len(symbols[0]) - 1))  # where each thing is
    wanted: list[str | None] = []
    for symbol in symbols:
        places = [int(symbol[1 + place]) for place in places]
        wanted.append("p" + "".join(map(str, places)))
    return wanted


def copying_oracle(symbols: list[str]) -> list[str | None]:
    """Keep what is not noise; say it again, one at every ">"."""
    kept: list[str] = []
    wanted: list[str | None] = []
    for symbol in symbols:
        if symbol.startswith("s"):
            kept.append(symbol)
        wanted.append(kept.pop(0) if symbol == ">" else None)
    return wanted


def induction_oracle(symbols: list[str]) -> list[str | None]:
    """The symbol after the first "!" is asked for at the second."""
    return [None] * (len(symbols) - 1) + [symbols[symbols.index("!") + 1]]


ORACLES = {
    "mqar": recall_oracle,
    "permutations": permutation_oracle,
    "copying": copying_oracle,
    "induction": induction_oracle,
}


@pytest.mark.parametrize("task", TASKS)
def test_an_oracle_gives_the_answer_to_every_target(task: str, tmp_path: Path) -> None:
    corpus = corpus_of(task, tmp_path)
    length, words = TASKS[task]["length"], corpus.tokenizer
    oracle = ORACLES[task.split()[0]]
    probe = PROBES[task.split()[0]](**TASKS[task])
    module = LMDataModule(corpus, context=length, micro_batch=16, seed=1)
    for batch in [*islice(module.train_dataloader(), 3), *module.val_dataloader(), *module.test_dataloader()]:
        for row, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist()):
            if set(targets) == {IGNORED}:  # fills the last batch
                continue
            wanted = oracle([words.decode([symbol]) for symbol in row])
            assert [None if t == IGNORED else words.decode([t]) for t in targets] == wanted
            assert sum(t is not None for t in wanted) == probe.counted


@pytest.mark.parametrize("task", TASKS)
def test_no_example_is_in_two_splits_and_none_is_lost(task: str, tmp_path: Path) -> None:
    corpus, length = corpus_of(task, tmp_path), TASKS[task]["length"]
    examples = {}
    for split, count in (("train", 300), ("val", 40), ("test", 40)):
        rows = corpus.store(split)[:].reshape(-1, length)
        assert len(rows) == corpus.store(split).documents == count
        examples[split] = {tuple(row.tolist()) for row in rows}
        assert len(examples[split]) == count
    assert not examples["train"] & examples["val"] and not examples["train"] & examples["test"]
    assert not examples["val"] & examples["test"]
    assert corpus.store("train").summary["unknown"] == 0


def test_few_possible_examples_are_still_divided() -> None:
    # 6^4 = 1,296 examples in all, far more drawn: repeated within a split, never across.
    probe = Permutations(length=4, group="S3", examples=20_000, eval_examples=2_000)
    seen = {
        split: {tuple(row) for block in probe.split(split) for row in block.tolist()}
        for split in ("train", "val", "test")
    }
    assert sum(len(rows) for rows in seen.values()) == len(set.union(*seen.values())) > 1_200
    assert min(len(rows) for rows in seen.values()) > 80


@pytest.mark.parametrize("task", ["mqar", "permutations"])
def test_the_same_settings_give_the_same_examples_and_others_do_not(task: str, tmp_path: Path) -> None:
    first, again = corpus_of(task, tmp_path / "a"), corpus_of(task, tmp_path / "b")
    assert first.content == again.content
    assert corpus_of(task, tmp_path / "a", length=40).content != first.content
    assert corpus_of(task, tmp_path / "a", examples=301).fingerprint != first.fingerprint
    # More examples are the same ones and then some.
    more = corpus_of(task, tmp_path / "a", examples=301).store("train")
    assert np.array_equal(more[: len(first.store("train"))], first.store("train")[:])


def test_recall_follows_the_published_layout() -> None:
    probe = Recall(length=64, pairs=4, keys=64)
    tokens = np.concatenate(list(islice(probe.split("train"), 4)))
    assert all(len(set(row[:8:2])) == len(set(row[1:8:2])) == 4 for row in tokens.tolist())
    _, asked = probe.answers(tokens)
    rows, places = np.nonzero(asked)
    gaps = Counter(((places - 8) // 2).tolist())
    assert ((places - 8) % 2 == 0).all() and len(gaps) == 28
    # p(g) ∝ (g + 1)^-0.99: the nearest gap is about twice, four times as frequent as the second and the fourth.
    assert gaps[0] > 1.3 * gaps[1] > 1.3 * gaps[3] > 1.3 * gaps[9] > gaps[20]
    assert np.array_equal(np.bincount(rows), np.full(len(tokens), 4))
    keys = Counter(tokens[:, :8:2].flatten().tolist())
    assert len(keys) == 64 and max(keys.values()) < 2 * min(keys.values())


@pytest.mark.parametrize(("group", "order"), [("S3", 6), ("S4", 24), ("A5", 60), ("S5", 120)])
def test_the_products_form_the_group(group: str, order: int) -> None:
    probe = Permutations(length=4, group=group)
    table, size = probe.product, int(group[1])
    assert set(probe.elements) <= set(permutations(range(size))) and len(set(probe.elements)) == order
    # The sign of a permutation is the determinant of its matrix.
    signs = [round(np.linalg.det(np.eye(size)[list(element)])) for element in probe.elements]
    assert set(signs) == ({1} if group[0] == "A" else {1, -1})
    assert np.array_equal(table[0], np.arange(len(table))) and np.array_equal(table[:, 0], np.arange(len(table)))
    assert all(len(set(row)) == len(table) for row in table.tolist())  # a Latin square
    a, b, c = np.random.default_rng(0).integers(0, len(table), (3, 500))
    assert np.array_equal(table[table[a, b], c], table[a, table[b, c]])
    assert not np.array_equal(table, table.T)


def test_a_longer_context_is_padded_and_a_shorter_one_refused(tmp_path: Path) -> None:
    corpus = corpus_of("mqar", tmp_path)
    short, padded = (LMDataModule(corpus, context=context, micro_batch=4, seed=1) for context in (64, 80))
    for exact, longer in zip(islice(short.train_dataloader(), 3), islice(padded.train_dataloader(), 3)):
        assert torch.equal(longer["tokens"][:, :64], exact["tokens"])
        assert torch.equal(longer["targets"][:, :64], exact["targets"])
        assert (longer["tokens"][:, 64:] == 0).all() and (longer["targets"][:, 64:] == IGNORED).all()
        assert longer["counted"] == exact["counted"] == 16
    with pytest.raises(UserError, match=r"model.context=63 is shorter than the examples.*model.context=64"):
        LMDataModule(corpus, context=63, micro_batch=4, seed=1)


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_reads_every_example_once(tmp_path: Path, world: int) -> None:
    corpus = corpus_of("permutations", tmp_path)
    for tokens, count in ((None, 40), (100, 5)):  # 100 tokens reach into the fifth example of 24
        module = LMDataModule(corpus, context=24, micro_batch=3, seed=1, eval_tokens=tokens)
        batches = [b for rank in range(world) for b in module._eval_batches("val", rank, world, tokens)]
        rows = torch.cat([b["tokens"][(b["targets"] != IGNORED).any(1)] for b in batches])
        wanted = corpus.store("val")[: count * 24].reshape(-1, 24)
        assert sorted(rows.tolist()) == sorted(wanted.tolist())


def test_counting_alone_knows_little_of_the_answers(tmp_path: Path) -> None:
    for task, guesses in (("mqar", 64), ("permutations", 6), ("induction", 15)):
        losses = ngram_losses(corpus_of(task, tmp_path))
        assert losses["unigram"] == pytest.approx(np.log(guesses), rel=0.1)
        assert losses["bigram"] == pytest.approx(np.log(guesses), rel=0.15)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"mqar": {"pairs": 65}}, r"data.mqar.pairs=65 is more than there are keys"),
        ({"mqar": {"pairs": 17}}, r"data.mqar.pairs=17 needs data.mqar.length=68"),
        ({"mqar": {"pair": 2}}, r"data.mqar.pair is not an option. Did you mean pairs"),
        ({"mqar": {"length": 2}}, r"data.mqar.length=2 must be a whole number ≥ 4"),
        ({"source": "copying", "copying": {"length": 30}}, r"data.copying.remembered=16 needs data.copying.length=32"),
        ({"packing": "aligned"}, r"data.packing and data.max_bytes do not apply"),
        ({"streaming": True}, r"data.streaming, data.packing"),
        ({"source": "permutations", "permutations": {"group": "S7"}}, r"group='S7' is not allowed.*S3, S4, A5, S5"),
    ],
)
def test_impossible_tasks_are_refused(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=part):
        build_corpus({"name": "mqar", "source": "mqar"} | options, {"kind": "word"}, tmp_path)


def test_a_task_brings_its_symbols(tmp_path: Path) -> None:
    assert data_settings(["data=mqar"])[1]["kind"] == data_settings(["data=permutations"])[1]["kind"] == "word"
    with pytest.raises(UserError, match=r"data=mqar consists of symbols: it needs tokenizer=word, not kind byte"):
        build_corpus({"name": "mqar", "source": "mqar"}, {"kind": "byte"}, tmp_path)
    parts = {"a": {"name": "mqar", "source": "mqar"}}
    with pytest.raises(UserError, match=r"data.parts.a is a task"):
        build_corpus(
            {"name": "m", "source": "mixture", "parts": parts, "weights": {"a": 1}}, {"kind": "word"}, tmp_path
        )


def test_the_shipped_lengths() -> None:
    for name, length, pairs in (("mqar", 64, 4), ("mqar_128", 128, 8), ("mqar_256", 256, 16)):
        chosen = data_settings([f"data={name}"])[0]
        assert (chosen["name"], chosen["mqar"]["length"], chosen["mqar"]["pairs"]) == (name, length, pairs)


def test_training_weighs_and_judges_by_answers(tmp_path: Path) -> None:
    """A shallow model learns at least which symbols are values: from ln of the vocabulary towards ln of the values."""
    from polarlm.attention import StandardAttention
    from polarlm.model import GPT, GPTConfig

    corpus = corpus_of("mqar tight", tmp_path, examples=2_000)
    torch.manual_seed(1)
    vocabulary = corpus.tokenizer.vocab_size
    model = GPT(
        GPTConfig(vocab_size=vocabulary, context=33, d_model=16, n_layer=1, n_head=1), partial(StandardAttention)
    )
    module = LMDataModule(corpus, context=33, micro_batch=32, seed=1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in islice(module.train_dataloader(), 60):
        optimiser.zero_grad()
        loss = model.loss(batch["tokens"], batch["targets"], reduction="sum") / batch["counted"]
        loss.backward()
        optimiser.step()
    values = [vocabulary - 8 + n for n in range(8)]
    with torch.no_grad():
        batch = next(iter(module.val_dataloader()))
        asked = batch["targets"] != IGNORED
        mass = model(batch["tokens"])[asked].softmax(-1)[:, values].sum(-1)
        assert set(batch["targets"][asked].tolist()) <= set(values)
    assert mass.min() > 0.9 and model.loss(batch["tokens"], batch["targets"]) < np.log(vocabulary) - 0.5


def test_every_probe_has_a_yaml() -> None:
    from polarlm.data.probes import PROBES

    for name, kind in PROBES.items():
        data, _, _ = data_settings([f"data={name}"])
        shipped = {key: value for key, value in data[name].items()}
        defaults = kind()
        assert isinstance(defaults, ProbeTask) and shipped == {key: getattr(defaults, key) for key in shipped}


def test_recall_with_random_filler_asks_for_every_key_once_among_symbols_of_all_kinds():
    probe = Recall(length=64, pairs=4, keys=512, random_filler=True)
    tokens = probe.draw(np.random.default_rng(3), 400)
    answers, asked = probe.answers(tokens)
    for row, answer, where in zip(tokens, answers, asked):
        pairs = dict(zip(row[0:8:2], row[1:8:2]))
        assert sorted(row[where]) == sorted(pairs) and not where[:8].any()
        assert [pairs[key] for key in row[where]] == list(answer[where])
    filler = tokens[:, 8:][~asked[:, 8:]]
    named = {probe.words[symbol][0] for symbol in filler}
    assert named == {"k", "v", "."} and (filler == 2).mean() < 0.02
