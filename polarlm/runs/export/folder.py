"""`polarlm export <run> --to hf`: weights, configuration, code, tokenizer and a model card; and the way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from polarlm.data.atomic import explained
from polarlm.errors import UserError
from polarlm.runs.export.bundle import bundle, flat_module_name
from polarlm.runs.export.card import model_card
from polarlm.runs.export.llama import from_llama, is_llama, llama_config, to_llama
from polarlm.runs.files import read_config, read_json, write_json, write_text
from polarlm.runs.restore import RestoredRun, load_weights, save_weights

MODELING = "modeling_polarlm"
KEPT = ("config.yaml", "corpus.json", "summary.json", "environment.json")  # what makes it a run folder again
ORIGIN = "polarlm_run"


def export_run(run: RestoredRun, out: Path) -> bool:
    """Write the folder; returns whether loading it needs its own code (trust_remote_code=True)."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / ORIGIN).exists())):
        raise UserError(f"{out} exists and was not written by export; choose another --out")
    if out.exists():
        shutil.rmtree(out)
    with explained(out):
        out.mkdir(parents=True)
    eos = run.tokenizer.eos_id
    remote = not is_llama(run.model)
    if remote:
        save_weights(_prefixed(run), out / "model.safetensors", tied=False)
        write_json(out / "config.json", _own_config(run))
        for name, text in _code(run).items():
            write_text(out / name, text)
    else:
        save_weights(to_llama(run.model), out / "model.safetensors", tied=False)
        write_json(out / "config.json", llama_config(run.model, eos))
    _write_tokenizer(run, out)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "bos_token_id": eos, "eos_token_id": eos}
    write_json(out / "generation_config.json", {**sampling, "pad_token_id": eos})
    write_text(out / "README.md", model_card(run, remote=remote))
    (out / ORIGIN).mkdir()
    for name in KEPT:
        if (run.folder / name).exists():
            shutil.copyfile(run.folder / name, out / ORIGIN / name)
    shutil.copytree(run.folder / "tokenizer", out / ORIGIN / "tokenizer")
    return remote


def import_run(folder: Path, out: Path) -> None:
    """A run folder with the exported model: the same weights, tokenizer and configuration."""
    if not (folder / ORIGIN / "config.yaml").exists():
        raise UserError(f"{folder} was not written by `polarlm export`: it has no {ORIGIN}/config.yaml")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists; choose another --out")
    weights = load_weights(folder / "model.safetensors")
    config = read_config(folder / ORIGIN / "config.yaml")
    about = read_json(folder / "config.json")
    if not isinstance(about, dict) or "model" not in config:
        raise UserError(f"{folder} was not written by `polarlm export`: its config.json or its {ORIGIN} is not ours")
    if about.get("model_type") == "llama":
        ours = from_llama(weights, config["model"]["n_layer"])
    else:
        ours = {name.removeprefix("model."): weight for name, weight in weights.items()}
    shutil.copytree(folder / ORIGIN, out, dirs_exist_ok=True)
    (out / "checkpoints").mkdir()
    save_weights(ours, out / "checkpoints" / "model.safetensors", tied=False)


def _prefixed(run: RestoredRun) -> dict[str, Tensor]:
    tied = run.model.config.tie_embeddings
    return {f"model.{k}": v for k, v in run.model.state_dict().items() if not (tied and k == "head.weight")}


def _own_config(run: RestoredRun) -> dict[str, Any]:
    c = run.model.config
    block = {key: value for key, value in run.config["block"].items() if not key.startswith("_") and key != "frame"}
    if "backend" in block:
        block["backend"] = "reference"  # the fast kernels need a compiler; the plain formulas go everywhere
    eos = run.tokenizer.eos_id
    return {
        "architectures": ["PolarlmForCausalLM"],
        "model_type": "polarlm",
        "auto_map": {
            "AutoConfig": f"{MODELING}.PolarlmConfig",
            "AutoModelForCausalLM": f"{MODELING}.PolarlmForCausalLM",
        },
        "gpt": {"vocab_size": c.vocab_size, **run.config["model"], "frame": c.frame, "checkpointing": False},
        "block": block,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }


def _code(run: RestoredRun) -> dict[str, str]:
    """modeling_polarlm.py for this run's block, and every file it needs."""
    mixer = type(run.model.blocks[0].mixer)
    template = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    line = "from polarlm.attention.standard import StandardAttention as BlockMixer"
    assert line in template
    text = template.replace(line, f"from {mixer.__module__} import {mixer.__qualname__} as BlockMixer")
    entry = f"polarlm.runs.export.{MODELING}"
    files = bundle(entry, text)
    files[f"{MODELING}.py"] = files.pop(f"{flat_module_name(entry)}.py")
    notice = "# Part of a model exported by polarlm (Apache-2.0).\n"
    return {name: notice + text for name, text in files.items()}


def _write_tokenizer(run: RestoredRun, out: Path) -> None:
    shutil.copyfile(run.folder / "tokenizer" / "tokenizer.json", out / "tokenizer.json")
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.config.context,
        "clean_up_tokenization_spaces": False,
    }
    eos = _eos_text(out / "tokenizer.json", run.tokenizer.eos_id)
    if eos is not None:
        described |= {"bos_token": eos, "eos_token": eos, "pad_token": eos}
    write_json(out / "tokenizer_config.json", described)


def _eos_text(path: Path, eos_id: int | None) -> str | None:
    if eos_id is None:
        return None
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    return next((token["content"] for token in added if token["id"] == eos_id), None)
