"""One evaluation job: a checkpoint in, numbers with their protocol out."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from polarlm.errors import UserError


def evaluate_run(cfg: DictConfig) -> float:
    """Evaluate the checkpoint, print its numbers and the protocol; returns the loss."""
    from polarlm.evaluation.judge import judge
    from polarlm.runs.files import write_json
    from polarlm.runs.restore import restore_run

    if OmegaConf.is_missing(cfg, "checkpoint"):
        raise UserError("checkpoint must be given: python eval.py checkpoint=runs/<name>")
    run = restore_run(str(cfg.checkpoint), cfg.device)
    found = judge(run, cfg.split, cfg.cache_dir)
    loss, perplexity, bits = (found[f"{cfg.split}/{key}"] for key in ("loss", "perplexity", "bits_per_byte"))
    print(f"{run.folder}  ({run.weights.name})")
    print(f"  {cfg.split} loss {loss:.6f}   perplexity {perplexity:.4f}   bits per byte {bits:.6f}")
    print("  protocol: " + ", ".join(f"{key} {value}" for key, value in found["protocol"].items()))
    if cfg.out:
        write_json(Path(cfg.out), found)
        print(f"  written to {cfg.out}")
    else:
        print(json.dumps(found))
    return float(loss)
