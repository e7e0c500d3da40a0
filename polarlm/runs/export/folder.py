"""`polarlm export <run> --to hf`: weights, configuration, code, tokenizer and a model card; and `polarlm import`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from polarlm.data import Tokenizer, load_tokenizer
from polarlm.data.atomic import explained
from polarlm.data.tokenizer import DESCRIPTION
from polarlm.errors import UserError
from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.runs.export.bundle import bundle
from polarlm.runs.export.llama import from_llama, is_llama, llama_config, to_llama
from polarlm.runs.files import (
    folder_beside,
    printable,
    read_config,
    read_json,
    require_plain_files,
    write_config,
    write_json,
    write_text,
)
from polarlm.runs.reading import MAX_NUMBER
from polarlm.runs.restore import RestoredRun, load_weights, save_weights

MODELING = "modeling_polarlm"
KEPT = ("config.yaml", "corpus.json", "summary.json", "environment.json")  # what makes it a run folder again
ORIGIN = "polarlm_run"
EXPORTED = (
    *("README.md", "config.json", "generation_config.json", "model.safetensors", f"{MODELING}.py"),
    *("tokenizer.json", "tokenizer_config.json"),
    *(f"{ORIGIN}/{name}" for name in (*KEPT, "tokenizer/tokenizer.json", f"tokenizer/{DESCRIPTION}")),
)


def export_run(run: RestoredRun, out: Path, verdict: str | None = None) -> bool:
    """Write the folder; returns whether loading it needs its own code (trust_remote_code=True).

    The model card says `verdict`, what is known about the block.
    A folder that export has written before gets new files; others in it stay as they are.
    """
    out = out.absolute()
    parts = (out, out / ORIGIN, out / ORIGIN / "tokenizer")
    if any(part.is_symlink() for part in parts) or (_has_content(out) and not parts[1].is_dir()):
        raise UserError(f"{out} exists and was not written by export; choose another --out")
    remote = not is_llama(run.model)
    with folder_beside(out) as beside:
        if remote:
            save_weights(_prefixed(run), beside / "model.safetensors", tied=False)
            write_json(beside / "config.json", _own_config(run))
            write_text(beside / f"{MODELING}.py", _code(run))
        else:
            save_weights(to_llama(run.model), beside / "model.safetensors", tied=False)
            write_json(beside / "config.json", llama_config(run.model, run.tokenizer.eos_id))
        _write_tokenizer(run, beside)
        eos = run.tokenizer.eos_id
        sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "bos_token_id": eos, "eos_token_id": eos}
        write_json(beside / "generation_config.json", {**sampling, "pad_token_id": eos})
        write_text(beside / "README.md", model_card(run, remote=remote, verdict=verdict))
        _keep_origin(run.folder, beside / ORIGIN, run.tokenizer)
        _publish(beside, out)
    return remote


def import_run(folder: Path, out: Path) -> None:
    """A run folder with the exported model: the same weights, tokenizer and configuration."""
    origin, out = folder / ORIGIN, out.absolute()
    if not (origin / "config.yaml").exists():
        raise UserError(f"{folder} was not written by `polarlm export`: it has no {ORIGIN}/config.yaml")
    if _has_content(out):
        raise UserError(f"{out} exists; choose another --out")
    for place in (folder, origin):
        require_plain_files(place)
    weights = load_weights(folder / "model.safetensors")
    about = read_json(folder / "config.json") or {}
    if about.get("model_type") == "llama":
        ours = from_llama(weights)
    else:
        ours = {name.removeprefix("model."): weight for name, weight in weights.items()}
    with folder_beside(out) as beside:
        _keep_origin(origin, beside, load_tokenizer(origin / "tokenizer"))
        (beside / "checkpoints").mkdir()
        save_weights(ours, beside / "checkpoints" / "model.safetensors", tied=False)
        _publish(beside, out)


def _keep_origin(source: Path, target: Path, tokenizer: Tokenizer) -> None:
    """What makes a run folder, read and written anew: whatever else lies there, or behind links, stays there."""
    for name in KEPT:
        if (source / name).is_symlink():
            raise UserError(f"{source / name} is a link to another file; put the file itself in its place")
    write_config(target / "config.yaml", read_config(source / "config.yaml"))
    for name in KEPT[1:]:
        if (record := read_json(source / name)) is not None:
            write_json(target / name, record)
    tokenizer.save(target / "tokenizer")


def _publish(beside: Path, out: Path) -> None:
    """Move a finished folder to its place; where an earlier export is, file by file, whole files only."""
    with explained(out):
        if not _has_content(out):
            if out.exists():
                out.rmdir()
            os.rename(beside, out)
            return
        for path in sorted(path for path in beside.rglob("*") if path.is_file()):
            target = out / path.relative_to(beside)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)


def _has_content(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


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


def _code(run: RestoredRun) -> str:
    """modeling_polarlm.py for this run's block: one file that needs torch and transformers alone."""
    mixer = type(run.model.blocks[0].mixer)
    template = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    line = "from polarlm.attention.standard import StandardAttention as BlockMixer"
    assert line in template
    text = template.replace(line, f"from {mixer.__module__} import {mixer.__qualname__} as BlockMixer")
    notice = f"# `{mixer.__qualname__}` for transformers, exported by polarlm (Apache-2.0).\n"
    return notice + bundle(f"polarlm.runs.export.{MODELING}", text)


def _write_tokenizer(run: RestoredRun, out: Path) -> None:
    write_text(out / "tokenizer.json", run.tokenizer.standard())
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


# -- the model card ---------------------------------------------------------------------------------------------------


ALONE = (
    "Nothing was compared: this is a single run, and a single run cannot show that one block is better than another."
)


def model_card(run: RestoredRun, *, remote: bool, verdict: str | None = None) -> str:
    """README.md of an exported folder: data, budget, numbers with their protocol, the verdict, how to load it."""
    config, summary = run.config, read_json(run.folder / "summary.json") or {}
    chosen, model = config.get("choices"), run.model.config
    choices = dict.fromkeys(("block", "data", "tokenizer"), "unknown")
    if isinstance(chosen, dict):
        choices |= {name: printable(value) for name, value in chosen.items()}
    rows = []
    for split in ("val", "test"):
        numbers = [(m, known_number(summary, f"{split}/{m.name}")) for m in METRICS]
        for m, v in numbers:
            if v is not None:
                unit = "" if m.unit == m.title else f" ({m.unit})"
                rows.append(f"| {split} | {m.title}{unit} | {formatted(m.name, v)} |")
    tokens, flops, seconds = (known_number(summary, key) for key in ("tokens", "flops_per_token", "seconds"))
    seed = known_number(config, "seed")
    budget = [
        f"{run.model.parameter_count():,} parameters",
        f"{tokens:,} training tokens" if tokens else None,
        f"{flops:,} training FLOPs per token" if flops else None,
        f"{seconds:.0f} seconds" if seconds else None,
        f"seed {seed}" if seed is not None else None,
    ]
    splits = (read_json(run.folder / "corpus.json") or {}).get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    counts = [(known_number(train, unit), unit) for unit in ("tokens", "bytes")] if isinstance(train, dict) else []
    size = "".join(f", {count:,} {unit}" for count, unit in counts if count is not None)
    trust = ", trust_remote_code=True" if remote else ""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [polarlm]",
        "---",
        f"# {run.folder.name}",
        "",
        f"A small language model with the `{choices['block']}` block, trained with polarlm as an experiment on "
        "transformer blocks. It continues text. It was not tuned to follow instructions, and its output is not "
        "filtered.",
        "",
        f"- **Data**: {choices['data']} (train split{size}), tokenizer {choices['tokenizer']}, "
        f"vocabulary {model.vocab_size:,}",
        f"- **Model**: {model.n_layer} layers, width {model.d_model}, {model.n_head} heads, context {model.context}",
        f"- **Budget**: {'; '.join(part for part in budget if part)}",
        "",
        "| split | metric | value |",
        "|---|---|---|",
        *rows,
        "",
        f"Measured on whole splits in windows of {model.context} tokens that do not overlap.",
        "",
        "## Is the block better?",
        "",
        verdict or ALONE,
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("."{trust})',
        f'tokenizer = AutoTokenizer.from_pretrained("."{trust})',
        "```",
        "",
    ]
    if remote:
        lines += [
            "transformers does not have this block, so its code is part of the repository: plain PyTorch, without the "
            "fast kernels of polarlm. Do not pad rows.",
            "",
        ]
    return "\n".join(lines)


def known_number(stored: dict[str, Any], key: str) -> int | float | None:
    """A number of a stored file; None if the file has none there, or one that no float holds."""
    value = stored.get(key)
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return value if right else None


# -- the Hugging Face hub ---------------------------------------------------------------------------------------------


NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_name(repo: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is written."""
    if not NAME.fullmatch(repo):
        raise UserError(f"--push {repo}: give the repository as owner/name")


def push_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Create the repository if it does not exist, commit the exported files, and return the address of the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    check_name(repo)
    require_plain_files(folder)
    if get_token() is None:
        raise UserError(f"--push {repo}: not logged in to the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
    files = [path for name in EXPORTED if (path := folder / name).is_file()]  # others in the folder stay private
    operations = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in files]
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.create_commit(repo, operations, commit_message="Exported by polarlm")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "?"
        why = {401: "the token is not valid", 403: "the token may not write there"}.get(status, f"HTTP {status}")
        raise UserError(f"--push {repo}: the hub refused it ({why}); the folder is complete in {folder}") from None
    except Exception as error:  # which library speaks HTTP, and so its errors, depends on huggingface_hub's version
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: the hub can't be reached ({reason}); the folder is complete in {folder}"
        ) from None
    return done.commit_url
