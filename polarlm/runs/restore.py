"""A trained model, its tokenizer and its data, rebuilt from the run folder alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from polarlm.data import Tokenizer, load_tokenizer
from polarlm.errors import UserError
from polarlm.model import GPT
from polarlm.model.build import build_model
from polarlm.runs.checkpoints import load_checkpoint

WEIGHTS = "model.safetensors"
LAST = "last.ckpt"


@dataclass
class RestoredRun:
    """What a run folder holds, ready to use."""

    folder: Path
    config: dict[str, Any]
    model: GPT
    tokenizer: Tokenizer
    weights: Path


def find_run(where: str | Path) -> tuple[Path, Path]:
    """(run folder, weight file) for a run folder or a file inside its checkpoints/."""
    path = Path(where)
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a run folder (runs/<name>) or a .ckpt or .safetensors file inside one"
        )
    if path.is_file():
        folder = path.parent.parent
        if path.suffix not in (".ckpt", ".safetensors"):
            raise UserError(f"{path} is neither a .ckpt nor a .safetensors file")
    else:
        folder = path
        found = [p for p in (folder / "checkpoints" / WEIGHTS, folder / "checkpoints" / LAST) if p.exists()]
        if (folder / "config.yaml").exists() and not found:
            raise UserError(f"{folder} holds no checkpoint yet; train it further, or name another run")
        path = found[0] if found else path
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml")
    return folder, path


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's state dict from either kind of file, without executing anything that is in it."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}") from error
    state = load_checkpoint(path).get("state_dict")
    if state is None:
        raise UserError(f"{path} is not a polarlm checkpoint: it has no state_dict")
    return {key.removeprefix("model."): value for key, value in state.items()}


def save_weights(model_state: dict[str, torch.Tensor], path: Path, *, tied: bool) -> None:
    """Write the weights as safetensors; a tied output matrix is stored once."""
    from safetensors.torch import save_file

    kept = {k: v.contiguous() for k, v in model_state.items() if not (tied and k == "head.weight")}
    beside = path.with_name(f".{path.name}.tmp")
    save_file(kept, beside)
    beside.replace(path)


def restore_run(where: str | Path, device: str = "auto") -> RestoredRun:
    """Rebuild a run from its folder; raises UserError when the pieces do not fit together."""
    folder, path = find_run(where)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(folder / "tokenizer")
    weights = load_weights(path)
    vocabulary = weights["embedding.weight"].shape[0]
    if vocabulary != tokenizer.vocab_size:
        raise UserError(
            f"{path} was trained with a vocabulary of {vocabulary}, but {folder / 'tokenizer'} has "
            f"{tokenizer.vocab_size} tokens: the two do not belong together"
        )
    model = build_model(config, vocabulary)
    if model.config.tie_embeddings:
        weights = {**weights, "head.weight": weights["embedding.weight"]}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the model of {folder / 'config.yaml'}: {error}") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RestoredRun(folder, config, model.to(device).eval(), tokenizer, path)
