"""One evaluation job: a checkpoint in, numbers with their protocol out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from polarlm.errors import UserError
from polarlm.evaluation.metrics import METRICS, formatted

if TYPE_CHECKING:
    from polarlm.runs.restore import RestoredRun


def evaluate_run(cfg: DictConfig) -> float:
    """Evaluate the checkpoint, print its numbers and the protocol; returns the loss."""
    from polarlm.runs.files import write_json
    from polarlm.runs.restore import restore_run

    if OmegaConf.is_missing(cfg, "checkpoint"):
        raise UserError("checkpoint must be given: python eval.py checkpoint=runs/<name>")
    run = restore_run(str(cfg.checkpoint), cfg.device)
    found = judge(run, cfg.split, cfg.cache_dir)
    print(f"{run.folder}  ({run.weights.name})")
    values = [(metric, found.get(f"{cfg.split}/{metric.name}")) for metric in METRICS]
    print(f"  {cfg.split}: " + ", ".join(f"{m.title} {formatted(m.name, value)}" for m, value in values if value))
    print("  protocol: " + ", ".join(f"{key} {value}" for key, value in found["protocol"].items()))
    if cfg.out:
        write_json(Path(cfg.out), found)
        print(f"  written to {cfg.out}")
    else:
        print(json.dumps(found))
    return float(found[f"{cfg.split}/loss"])


def judge(run: RestoredRun, split: str, cache_dir: str) -> dict[str, Any]:
    """Numbers of a run on a split of the corpus it was trained on, exactly as at the end of its training."""
    from polarlm.data import LMDataModule, build_corpus
    from polarlm.evaluation.metrics import measure
    from polarlm.evaluation.tally import tally_batches
    from polarlm.evaluation.text_size import text_size
    from polarlm.runs.files import read_json
    from polarlm.training.batching import plan_batches

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
    counted = tally_batches(
        run.model, data.eval_dataloader(split, whole=True), text_size(corpus.store(split), corpus.tokenizer)
    )
    protocol = {
        "data": config["choices"]["data"],
        "split": split,
        "tokenizer": config["choices"]["tokenizer"],
        "context": plan.context,
        "stride": plan.context,
        "tokens": counted.targets,
        "corpus": corpus.fingerprint,
    }
    return {**{f"{split}/{name}": value for name, value in measure(counted).items()}, "protocol": protocol}
