"""Judge a run on a whole split, with the protocol named beside the number."""

from __future__ import annotations

import math
from typing import Any

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.errors import UserError
from polarlm.runs.files import read_json
from polarlm.runs.restore import RestoredRun
from polarlm.training.batching import plan_batches
from polarlm.training.validation import evaluate


def baseline_numbers(losses: dict[str, float], corpus: Corpus) -> dict[str, dict[str, float]]:
    """Loss, perplexity and bits per byte of the n-gram baselines on the validation split."""
    per_token = corpus.store("val").bytes_per_token
    return {
        name: {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / per_token}
        for name, loss in losses.items()
    }


def judge(run: RestoredRun, split: str, cache_dir: str) -> dict[str, Any]:
    """Numbers of a run on a split of the corpus it was trained on, exactly as at the end of its training."""
    config = run.config
    corpus = build_corpus(config["data"], config["tokenizer"], cache_dir)
    recorded = read_json(run.folder / "corpus.json") or {}
    if recorded.get("fingerprint") != corpus.fingerprint:
        raise UserError(
            f"The corpus has changed since {run.folder} was trained (fingerprint {corpus.fingerprint}, "
            f"the run recorded {recorded.get('fingerprint')}); its numbers could not be compared"
        )
    if split not in corpus.splits:
        raise UserError(f"split={split} does not exist; this corpus has {', '.join(corpus.splits)}")
    trainer = config["trainer"]
    # The same micro-batches as in training on one process: the same sums in the same order.
    plan = plan_batches(int(trainer["batch_tokens"]), config["model"]["context"], 1, int(trainer["micro_batch_tokens"]))
    data = LMDataModule(
        corpus,
        context=plan.context,
        micro_batch=plan.micro,
        seed=config["seed"],
        mask_documents=config["data"]["mask_documents"],
    )
    found = evaluate(
        run.model,
        data.eval_dataloader(split, whole=True),
        bytes_per_token=corpus.store(split).bytes_per_token,
        device=run.model.embedding.weight.device,
    )
    protocol = {
        "data": config["choices"]["data"],
        "split": split,
        "tokenizer": config["choices"]["tokenizer"],
        "context": plan.context,
        "stride": plan.context,
        "tokens": found.pop("tokens"),
        "corpus": corpus.fingerprint,
    }
    return {**{f"{split}/{key}": value for key, value in found.items()}, "protocol": protocol}
