"""The questions `eval.py` can ask a run, by the names people type; each is answered by a function of evaluation.

A new protocol is one function there and one here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from polarlm.data import Corpus, build_corpus
from polarlm.data.baselines import ngram_losses
from polarlm.errors import UserError
from polarlm.evaluation.by_frequency import loss_by_frequency, token_counts
from polarlm.evaluation.by_position import loss_by_position
from polarlm.evaluation.calibration import calibration
from polarlm.evaluation.corruption import loss_by_corruption
from polarlm.evaluation.documents import losses_of_documents
from polarlm.evaluation.downstream import blimp as blimp_task
from polarlm.evaluation.downstream import lambada as lambada_task
from polarlm.evaluation.downstream.files import read_rows, task_file
from polarlm.evaluation.downstream.rolling import roll_documents
from polarlm.evaluation.length import loss_by_length
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.scores import Scores, score_text
from polarlm.evaluation.shuffled import shuffling_control
from polarlm.evaluation.tally import tally_batches
from polarlm.evaluation.text import Text, read_text
from polarlm.runs.files import read_json
from polarlm.runs.restore import RestoredRun
from polarlm.training.batching import plan_batches

TRAINING_TOKENS = 50_000_000  # counted for the frequency of tokens


@dataclass
class Answer:
    """What a protocol found: how exactly it asked, the numbers, and arrays too long for a JSON file."""

    asked: dict[str, Any]
    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray] | None = field(default=None)


@dataclass
class Question:
    """A run, the corpus it is judged on, and the options of `eval.py`."""

    run: RestoredRun
    corpus: Corpus
    split: str
    options: dict[str, Any]

    @property
    def masked(self) -> bool:
        """A run trained with closed documents is judged with closed documents."""
        return bool(self.run.config["data"]["mask_documents"])

    @property
    def context(self) -> int:
        """Tokens per window: what was asked for, else what the run was trained with."""
        return int(self.options["context"] or self.run.model.config.context)

    @cached_property
    def text(self) -> Text:
        """The part of the split that is read."""
        return read_text(self.corpus.store(self.split), self.corpus.tokenizer, self.options["tokens"])

    @cached_property
    def scores(self) -> Scores:
        """Every token scored once, in windows that do not overlap."""
        return score_text(self.run.model, self.text, context=self.context, mask_documents=self.masked)


def windows(q: Question) -> Answer:
    """Windows that do not overlap: the protocol of validation, and to the last bit its numbers on the whole split."""
    if q.options["tokens"] or q.options["context"]:
        counted = q.scores.tally(q.text)
    else:
        # The same micro-batches as in training on one process: the same sums in the same order.
        trainer, context = q.run.config["trainer"], q.context
        plan = plan_batches(int(trainer["batch_tokens"]), context, 1, int(trainer["micro_batch_tokens"]))
        from polarlm.data.order.examples import eval_batches

        store, probe = q.corpus.store(q.split), q.corpus.probe
        batches = eval_batches(store, probe, context, plan.micro, mask_documents=q.masked)
        counted = tally_batches(q.run.model, batches, q.text.size)
    return Answer({"stride": q.context, "tokens": counted.targets}, {"metrics": measure(counted)})


def sliding(q: Question) -> Answer:
    """Overlapping windows: every token with at least context − stride tokens before it."""
    stride = int(q.options["stride"] or max(1, q.context // 2))
    scores = score_text(q.run.model, q.text, context=q.context, stride=stride, mask_documents=q.masked)
    counted = scores.tally(q.text)
    return Answer({"stride": stride, "tokens": counted.targets}, {"metrics": measure(counted)})


def position(q: Question) -> Answer:
    """Loss by the number of tokens read before the target."""
    return Answer(_plain(q), {"by_position": loss_by_position(q.scores, q.context)})


def frequency(q: Question) -> Answer:
    """Loss by how often the target occurs in the text the run was trained on."""
    own = build_corpus(q.run.config["data"], q.run.config["tokenizer"], q.options["cache_dir"])
    train = own.store("train")[:TRAINING_TOKENS].astype(np.int64)
    counts = token_counts(train, q.run.tokenizer.vocab_size)
    return Answer({**_plain(q), "training_tokens": len(train)}, {"by_frequency": loss_by_frequency(q.scores, counts)})


def length(q: Question) -> Answer:
    """The run read at multiples of the context it was trained with."""
    factors = [int(factor) for factor in q.options["lengths"]]
    numbers = loss_by_length(q.run.model, q.text, factors, mask_documents=q.masked)
    asked = {"context": numbers["context"], "stride": numbers["context"], "tokens": len(q.text.tokens) - 1}
    return Answer(asked, {"by_length": numbers})


def corruption(q: Question) -> Answer:
    """Part of what is read replaced: random tokens, exchanged tokens, repeated tokens."""
    kinds, rates = list(q.options["corruptions"]), [float(rate) for rate in q.options["rates"]]
    seed = int(q.options["seed"])
    numbers = loss_by_corruption(q.run.model, q.text, kinds, rates, seed=seed, mask_documents=q.masked)
    return Answer({**_plain(q), "kinds": kinds, "rates": rates, "seed": seed}, {"by_corruption": numbers})


def shuffled(q: Question) -> Answer:
    """Negative control: documents with their tokens in random order."""
    bigram = ngram_losses(q.corpus, q.split, tokens=len(q.text.tokens))["bigram"]
    seed = int(q.options["seed"])
    numbers = shuffling_control(q.run.model, q.text, bigram, seed=seed, mask_documents=q.masked)
    return Answer({**_plain(q), "seed": seed}, {"control": numbers})


def calibrated(q: Question) -> Answer:
    """Reliability of the predicted probabilities."""
    return Answer(_plain(q), {"calibration": calibration(q.run.model, q.text, mask_documents=q.masked)})


def confidence(q: Question) -> Answer:
    """Correlation of magnitude and evidence with loss and entropy, per layer."""
    from polarlm.diagnostics.confidence import confidence as correlations

    return Answer(_plain(q), {"confidence": correlations(q.run.model, q.text, mask_documents=q.masked)})


def documents(q: Question) -> Answer:
    """The losses of every document, kept for comparisons of two checkpoints."""
    arrays = losses_of_documents(q.scores, q.text, q.run.tokenizer)
    numbers = {"documents": len(arrays["nats"]), "metrics": measure(q.scores.tally(q.text))}
    return Answer(_plain(q), numbers, arrays)


def rolling(q: Question) -> Answer:
    """Every document by itself after an end of text, as lm-evaluation-harness reads WikiText's pages."""
    counted = roll_documents(q.run.model, q.text, q.run.tokenizer)
    return Answer({"stride": q.run.model.config.context, "tokens": counted.targets}, {"metrics": measure(counted)})


def blimp(q: Question) -> Answer:
    """Minimal pairs of grammar, from a local file."""
    return _downstream(q, blimp_task.LOCAL, "blimp", blimp_task.blimp)


def lambada(q: Question) -> Answer:
    """The last words of passages, from a local file."""
    return _downstream(q, lambada_task.LOCAL, "lambada", lambada_task.lambada)


def _downstream(q: Question, file: str, name: str, task: Callable[..., dict[str, Any]]) -> Answer:
    rows = read_rows(task_file(file), q.options["examples"])
    asked = {"data": name, "split": "test", "stride": None, "tokens": None, "corpus": file, "examples": len(rows)}
    return Answer(asked, {name: task(q.run.model, q.run.tokenizer, rows)})


def _plain(q: Question) -> dict[str, Any]:
    return {"stride": q.context, "tokens": len(q.scores.nats) if "scores" in q.__dict__ else len(q.text.tokens) - 1}


PROTOCOLS: dict[str, Callable[[Question], Answer]] = {
    "windows": windows,
    "sliding": sliding,
    "position": position,
    "frequency": frequency,
    "length": length,
    "corruption": corruption,
    "shuffled": shuffled,
    "calibration": calibrated,
    "confidence": confidence,
    "documents": documents,
    "rolling": rolling,
    "blimp": blimp,
    "lambada": lambada,
}


def corpus_for(run: RestoredRun, data: dict[str, Any] | None, cache_dir: str) -> Corpus:
    """The corpus a run is judged on: its own, unchanged since; or another one, cut by the run's tokenizer."""
    if data is not None:
        return build_corpus(data, {"kind": "file", "path": str(run.folder / "tokenizer")}, cache_dir)
    corpus = build_corpus(run.config["data"], run.config["tokenizer"], cache_dir)
    recorded = read_json(run.folder / "corpus.json") or {}
    if recorded.get("fingerprint") != corpus.fingerprint:
        raise UserError(
            f"The corpus has changed since {run.folder} was trained (fingerprint {corpus.fingerprint}, "
            f"the run recorded {recorded.get('fingerprint')}); its numbers could not be compared"
        )
    return corpus
