"""Run folders as the trainer writes them, made up: deterministic, realistic in shape, quick to write by hundreds."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

# Final bits per byte, growth of the residual RMS over depth, relative cost of a token: plausible, not measured.
BLOCKS = {
    "standard": {"final": 2.02, "growth": 3.6, "cost": 1.00, "extra_parameters": 0},
    "xsa": {"final": 2.005, "growth": 2.9, "cost": 1.03, "extra_parameters": 0},
    "rfa": {"final": 2.00, "growth": 2.2, "cost": 1.17, "extra_parameters": 224},
    "polar": {"final": 1.96, "growth": 1.5, "cost": 1.22, "extra_parameters": 352},
}
PARAMETERS = 1_184_000
BATCH_TOKENS = 4096
BYTES_PER_TOKEN = 3.1


def write_run(
    folder: Path,
    block: str = "standard",
    seed: int = 1,
    steps: int = 600,
    *,
    log_every: int = 10,
    probe_every: int = 100,
    diagnostics: bool = True,
    status: str = "finished",
    tokenizer: str = "bpe",
    context: int = 128,
    layers: int = 4,
    heads: int = 4,
    name: str | None = None,
    changes: dict | None = None,
    diverged: bool = False,
    evaluations: bool = False,
) -> Path:
    """Write one run folder; `status=None` leaves the summary out as a kill would."""
    rng = np.random.default_rng([seed, sum(block.encode()), steps])
    facts = BLOCKS.get(block, BLOCKS["standard"])
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "seed": seed,
        "name": name or folder.name,
        "group": "first-look",
        "choices": {"block": block, "model": "nano", "data": "pydocs", "tokenizer": tokenizer},
        "block": {"_target_": f"polarlm.attention.{block.capitalize()}Attention", "_partial_": True},
        "model": {"d_model": 128, "n_layer": layers, "n_head": heads, "context": context},
        "data": {"source": "pydocs"},
        "tokenizer": {"kind": tokenizer, "vocab_size": 4096},
        "optim": {"lr": 3e-3},
        "trainer": {"max_steps": steps, "batch_tokens": BATCH_TOKENS, "log_every": log_every},
    }
    if block == "polar":
        config["block"] |= {"kernel": "student", "projection": "evidence"}
    for key, value in (changes or {}).items():
        part, _, leaf = key.partition(".")
        (config[part] if leaf else config)[leaf or part] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    flops_per_token = int(6 * PARAMETERS * facts["cost"])
    rows = list(_metric_rows(rng, seed, facts, steps, log_every, flops_per_token, diverged))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status is not None:
        _write_summary(folder, config, rows, status, flops_per_token, facts)
    if evaluations:
        _write_evaluations(folder, facts, rng)
    if diagnostics:
        (folder / "diagnostics").mkdir(exist_ok=True)
        probes = [
            _probe(block, facts, s / steps, s, layers, heads, context, rng) for s in range(0, steps + 1, probe_every)
        ]
        (folder / "diagnostics" / "probe.jsonl").write_text("".join(json.dumps(p) + "\n" for p in probes))
    return folder


def write_sweep(folder: Path, blocks=("standard", "rfa", "polar"), seeds=(1, 2, 3), **options) -> list[Path]:
    """A sweep of blocks × seeds."""
    return [write_run(folder / f"{block}-seed{seed}", block, seed, **options) for block in blocks for seed in seeds]


def _metric_rows(rng, seed, facts, steps, log_every, flops_per_token, diverged):
    to_loss = BYTES_PER_TOKEN * math.log(2)
    offset = 0.012 * np.random.default_rng(seed).normal()  # shared by all blocks of a seed: what pairing takes away
    final = facts["final"] + offset + 0.003 * rng.normal()
    for step in [1, *range(log_every, steps + 1, log_every)]:
        tokens = step * BATCH_TOKENS
        clean = final + 0.6 * (1 / math.sqrt(1 + 40 * step / steps) - 1 / math.sqrt(41)) + 3.5 * math.exp(-step / 15)
        row = {
            "step": step,
            "tokens": tokens,
            "seconds": round(step * 0.09 * facts["cost"] * (1 + 0.01 * seed), 3),
            "flops": tokens * flops_per_token,
            "train/loss": round(to_loss * (clean + 0.03 * rng.normal() - 0.05), 5),
            "train/lr": 3e-3 * min(1, step / 50) * (1 - 0.9 * step / steps),
            "train/grad_norm": round(float(abs(rng.normal(0.6, 0.1))), 4),
            "tokens_per_second": round(BATCH_TOKENS / 0.09 / facts["cost"] * (1 + 0.02 * rng.normal()), 1),
        }
        if step % (10 * log_every) == 0 or step == steps:
            loss = to_loss * clean
            row |= {"val/loss": loss, "val/perplexity": math.exp(loss), "val/bits_per_byte": clean}
            row |= {"val/word_perplexity": math.exp(2 * loss), "val/character_perplexity": math.exp(loss / 2)}
            row |= {"val/accuracy": math.exp(-loss)}
        if diverged and step > steps // 2:
            row |= {key: None for key in row if key.startswith(("train/loss", "val/"))}
        yield row


def _write_summary(folder, config, rows, status, flops_per_token, facts):
    last = rows[-1]
    summary = {
        "name": config["name"],
        "block": config["choices"]["block"],
        "group": config["group"],
        "seed": config["seed"],
        "status": status,
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens_per_second"],
        "parameters": PARAMETERS + facts["extra_parameters"],
        "flops_per_token": flops_per_token,
        "baselines": {
            "unigram": {"loss": 6.7, "perplexity": 812.4, "bits_per_byte": 3.12},
            "bigram": {"loss": 5.1, "perplexity": 164.0, "bits_per_byte": 2.37},
        },
        "sample": f"Once upon a time the {config['choices']['block']} block wrote a line,\nand then another one.",
    }
    if status == "finished":
        for key in ("loss", "perplexity", "bits_per_byte"):
            value = last.get(f"val/{key}")
            summary |= {f"val/{key}": value, f"test/{key}": None if value is None else value * 1.004}
    (folder / "summary.json").write_text(json.dumps(summary))


def _write_evaluations(folder, facts, rng):
    """Records as eval.py leaves them: numbers, loss at longer contexts, and calibration."""
    (folder / "evaluations").mkdir(exist_ok=True)
    bits = [facts["final"] * (1 + 0.02 * k * facts["growth"] / 3) + 0.003 * rng.normal() for k in range(4)]
    reliability = {"probability": [0.1, 0.5, 0.9], "frequency": [0.12, 0.47, 0.86], "predictions": [10, 10, 10]}
    metrics = [{"loss": 2.1 * b, "perplexity": math.exp(2.1 * b), "bits_per_byte": b} for b in bits]
    positions = [{"to": [8, 64, 128 * n], "loss": [4.5, 4.2, 4.1 + 0.1 * n]} for n in (1, 2, 4, 8)]
    lengths = {"factor": [1, 2, 4, 8], "context": [128, 256, 512, 1024], "metrics": metrics, "by_position": positions}
    answers = {
        "blimp": {"blimp": {"accuracy": 0.55 + 0.01 * rng.normal(), "accuracy_of_paradigms": 0.54}},
        "confidence": {"confidence": {"magnitude_loss": {"spearman": [-0.2, None, -0.4]}}},
        "sliding": {"metrics": metrics[0]},
        "length": {"by_length": lengths},
        "calibration": {"calibration": {"ece": 0.03, "reliability": reliability}},
    }
    for name, answer in answers.items():
        record = {"protocol": {"name": name, "data": "pydocs", "split": "test", "tokens": 4096}, **answer}
        (folder / "evaluations" / f"{name}-pydocs-test-00000000.json").write_text(json.dumps(record))


def _probe(block, facts, progress, step, layers, heads, context, rng):
    depth = np.arange(layers + 1) / layers
    growth = 1 + (facts["growth"] - 1) * min(1, 0.2 + progress)
    rms = 0.6 * growth**depth * (1 + 0.02 * rng.normal(size=layers + 1))
    measured = np.diff(rms)
    predicted = measured * (0.92 if block in ("standard", "xsa") else 0.4) + 0.02 * rng.normal(size=layers)
    head = rng.normal(size=(layers, heads))
    values = {
        "radial/residual_rms": rms,
        "radial/growth_latent": measured,
        "radial/growth_attention": 0.5 * measured,
        "radial/growth_predicted": predicted,
        "radial/growth_latent_slope": 0.9 + 0.05 * rng.normal(size=layers),
        "radial/growth_latent_r2": 0.8 + 0.05 * rng.random(size=layers),
        "radial/resultant_length": 0.5 + 0.1 * head,
        "attention/entropy": 2.5 - 0.8 * progress + 0.4 * head,
        "attention/mass_first": np.abs(0.08 * head),
        "precision/log_evidence": 1.5 * head + progress,
    }
    profiles = {}
    if block in ("rfa", "polar"):
        lags = np.unique(np.geomspace(1, context - 1, 24).astype(int))
        rate = np.geomspace(0.002, 0.1, heads)[None, :, None] * (1 + np.arange(layers)[:, None, None] / layers)
        kappa = np.log(0.1 + 4 * np.exp(-rate * lags * (0.5 + progress)))
        values |= {
            "precision/robust_weight": 0.8 + 0.05 * head,
            "parameters/nu_t": 4 - progress * (1 + 0.2 * np.arange(heads)) + 0.05 * head,
            "parameters/mu": np.broadcast_to(rate[..., 0] * (0.5 + progress), (layers, heads)),
        }
        profiles["precision/log_kappa"] = {"x": lags, "y": kappa, "xlabel": "lag"}
    return {
        "step": step,
        "tokens": step * BATCH_TOKENS,
        "layers": layers,
        "heads": heads,
        "values": {k: np.round(v, 5).tolist() for k, v in values.items()},
        "profiles": {k: {**p, "x": p["x"].tolist(), "y": np.round(p["y"], 5).tolist()} for k, p in profiles.items()},
    }
