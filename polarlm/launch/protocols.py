"""The questions `eval.py` can ask a run: protocol=NAME is answered by run_NAME, with a function of evaluation.

A new protocol is one function there, one here, and its name in launch/evaluate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from polarlm.data import Corpus, build_corpus
from polarlm.data.corpus import corpus_in_cache
from polarlm.errors import UserError
from polarlm.evaluation.breakdowns import (
    calibration,
    loss_by_frequency,
    loss_by_position,
    losses_of_documents,
    ngram_losses,
)
from polarlm.evaluation.downstream import (
    BLIMP_FILE,
    LAMBADA_FILE,
    blimp,
    lambada,
    read_rows,
    roll_documents,
    task_file,
)
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.robustness import loss_by_corruption, loss_by_length, shuffling_control
from polarlm.evaluation.scores import Scores, Text, read_text, score_text
from polarlm.locations import CONFIGS, shipped_settings
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
class EvaluationTask:
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


def run_windows(task: EvaluationTask) -> Answer:
    """Windows that do not overlap: the protocol of validation, and to the last bit its numbers on the whole split."""
    if task.options["tokens"] or task.options["context"]:
        counted = task.scores.tally(task.text)
    else:
        from polarlm.data.module import EvalLoader, eval_batches
        from polarlm.training.loop import quiet_libraries
        from polarlm.training.module import evaluate_split

        # The same micro-batches as in training on one process: the same sums in the same order.
        trainer, context = task.run.config["trainer"], task.context
        plan = plan_batches(int(trainer["batch_tokens"]), context, 1, int(trainer["micro_batch_tokens"]))
        store, probe = task.corpus.store(task.split), task.corpus.probe
        batches = eval_batches(store, probe, context, plan.micro, mask_documents=task.masked)
        quiet_libraries()
        counted = evaluate_split(task.run.model, EvalLoader(batches, task.corpus, None))
    return Answer({"stride": task.context, "tokens": counted.targets}, {"metrics": measure(counted)})


def run_sliding(task: EvaluationTask) -> Answer:
    """Overlapping windows: every token with at least context − stride tokens before it."""
    stride = int(task.options["stride"] or max(1, task.context // 2))
    scores = score_text(task.run.model, task.text, context=task.context, stride=stride, mask_documents=task.masked)
    counted = scores.tally(task.text)
    return Answer({"stride": stride, "tokens": counted.targets}, {"metrics": measure(counted)})


def run_position(task: EvaluationTask) -> Answer:
    """Loss by the number of tokens read before the target."""
    return Answer(_plain(task), {"by_position": loss_by_position(task.scores, task.context)})


def run_frequency(task: EvaluationTask) -> Answer:
    """Loss by how often the target occurs in the text the run was trained on."""
    trained_on = corpus_of_run(task.run, task.options)
    train = trained_on.store("train")[:TRAINING_TOKENS].astype(np.int64)
    counts = np.bincount(train, minlength=task.run.tokenizer.vocab_size)
    return Answer(
        {**_plain(task), "training_tokens": len(train)}, {"by_frequency": loss_by_frequency(task.scores, counts)}
    )


def run_length(task: EvaluationTask) -> Answer:
    """The run read at multiples of the context it was trained with."""
    factors = [int(factor) for factor in task.options["lengths"]]
    numbers = loss_by_length(task.run.model, task.text, factors, mask_documents=task.masked)
    asked = {"context": numbers["context"], "stride": numbers["context"], "tokens": len(task.text.tokens) - 1}
    return Answer(asked, {"by_length": numbers})


def run_corruption(task: EvaluationTask) -> Answer:
    """Part of what is read replaced: random tokens, exchanged tokens, repeated tokens."""
    kinds, rates = list(task.options["corruptions"]), [float(rate) for rate in task.options["rates"]]
    seed = int(task.options["seed"])
    numbers = loss_by_corruption(task.run.model, task.text, kinds, rates, seed=seed, mask_documents=task.masked)
    return Answer({**_plain(task), "kinds": kinds, "rates": rates, "seed": seed}, {"by_corruption": numbers})


def run_shuffled(task: EvaluationTask) -> Answer:
    """Negative control: documents with their tokens in random order."""
    bigram = ngram_losses(task.corpus, task.split, tokens=len(task.text.tokens))["bigram"]
    seed = int(task.options["seed"])
    numbers = shuffling_control(task.run.model, task.text, bigram, seed=seed, mask_documents=task.masked)
    return Answer({**_plain(task), "seed": seed}, {"control": numbers})


def run_calibration(task: EvaluationTask) -> Answer:
    """Reliability of the predicted probabilities."""
    return Answer(_plain(task), {"calibration": calibration(task.run.model, task.text, mask_documents=task.masked)})


def run_confidence(task: EvaluationTask) -> Answer:
    """Correlation of magnitude and evidence with loss and entropy, per layer."""
    from polarlm.diagnostics.probe import confidence

    return Answer(_plain(task), {"confidence": confidence(task.run.model, task.text, mask_documents=task.masked)})


def run_documents(task: EvaluationTask) -> Answer:
    """The losses of every document, kept for comparisons of two checkpoints."""
    arrays = losses_of_documents(task.scores, task.text, task.run.tokenizer)
    numbers = {"documents": len(arrays["nats"]), "metrics": measure(task.scores.tally(task.text))}
    return Answer(_plain(task), numbers, arrays)


def run_rolling(task: EvaluationTask) -> Answer:
    """Every document by itself after an end of text, as lm-evaluation-harness reads WikiText's pages."""
    counted = roll_documents(task.run.model, task.text, task.run.tokenizer)
    return Answer({"stride": task.run.model.config.context, "tokens": counted.targets}, {"metrics": measure(counted)})


def run_downstream(file: str, name: str, judge: Callable[..., dict[str, Any]], task: EvaluationTask) -> Answer:
    """A task of its own examples, from a local file: minimal pairs of grammar, the last words of passages."""
    rows = read_rows(task_file(file), task.options["examples"])
    asked = {"data": name, "split": "test", "stride": None, "tokens": None, "corpus": file, "examples": len(rows)}
    return Answer(asked, {name: judge(task.run.model, task.run.tokenizer, rows)})


run_blimp = partial(run_downstream, BLIMP_FILE, "blimp", blimp)
run_lambada = partial(run_downstream, LAMBADA_FILE, "lambada", lambada)


def _plain(task: EvaluationTask) -> dict[str, Any]:
    tokens = len(task.scores.nats) if "scores" in task.__dict__ else len(task.text.tokens) - 1
    return {"stride": task.context, "tokens": tokens}


def corpus_for(run: RestoredRun, options: dict[str, Any]) -> Corpus:
    """The corpus a run is judged on: data=…, cut by the run's tokenizer; else the run's own, unchanged since."""
    if options.get("data") is not None:
        tokenizer = {"kind": "file", "path": str(run.folder / "tokenizer")}
        return build_corpus(options["data"], tokenizer, options["cache_dir"])
    return corpus_of_run(run, options)


def corpus_of_run(run: RestoredRun, options: dict[str, Any]) -> Corpus:
    """What the run was trained on, from the cache; prepared again only from where polarlm's own yamls or the user say.

    An untrusted run could name a private file, or an address that learns who judges it.
    """
    recorded = str((read_json(run.folder / "corpus.json") or {}).get("fingerprint"))
    corpus = corpus_in_cache(options["cache_dir"], recorded)
    if corpus is not None:
        return corpus
    if not options["trust_data"] and (places := foreign_places(run.config)):
        raise UserError(
            f"{run.folder} was trained on text that is not prepared here, and only its config.yaml says where it is "
            f"({', '.join(places)}); name the text yourself (data=text data.path=…), or add --trust-data"
        )
    corpus = build_corpus(run.config["data"], run.config["tokenizer"], options["cache_dir"])
    if recorded != corpus.fingerprint:
        raise UserError(
            f"The corpus has changed since {run.folder} was trained (fingerprint {corpus.fingerprint}, "
            f"the run recorded {recorded}); its numbers could not be compared"
        )
    return corpus


PLACES = {"data": ("path", "local", "url", "hub"), "tokenizer": ("path", "local", "hub")}


def foreign_places(config: dict[str, Any]) -> list[str]:
    """'key=value' of every file, address or dataset that a configuration names and no yaml of polarlm does."""
    parts = config["data"].get("parts")  # of a mixture
    sections = [("tokenizer", config["tokenizer"]), ("data", config["data"])]
    sections += [("data", part) for part in (parts.values() if isinstance(parts, dict) else [])]
    foreign = []
    for group, section in sections:
        shipped = [shipped_settings(group, path.stem) for path in sorted((CONFIGS / group).glob("*.yaml"))]
        places = {key: section.get(key) for key in PLACES[group]} if isinstance(section, dict) else {"": section}
        for key, place in places.items():
            if place is not None and not any(same_place(place, settings.get(key)) for settings in shipped):
                foreign.append(f"{group}.{key}={str(place)[:200]}")
    return foreign


def same_place(stored: Any, shipped: Any) -> bool:
    """Whether a stored place is the shipped one; a dataset may say more than which one it is."""
    if isinstance(stored, dict) and isinstance(shipped, dict):
        return all(stored.get(key) == shipped.get(key) for key in ("name", "config", "revision")) and "name" in shipped
    return stored == shipped
