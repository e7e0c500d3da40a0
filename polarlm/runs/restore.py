"""A trained model, its tokenizer and its data, rebuilt from the run folder alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from polarlm.block_keys import current_block
from polarlm.data import Tokenizer, load_tokenizer
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.model.build import build_model
from polarlm.runs.checkpoints import load_verified, newest_usable
from polarlm.runs.files import read_config, require_plain_files
from polarlm.runs.identity import with_additions
from polarlm.runs.tensor_files import DamagedCheckpoint, read_tensors, write_tensors
from polarlm.settings import read_settings

WEIGHTS = "model.safetensors"
REQUIRED = ("choices", "model", "block", "data", "tokenizer", "trainer")  # groups of a configuration


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
    if not path.is_dir():
        folder = path.parent.parent
        if path.suffix not in (".ckpt", ".safetensors"):
            raise UserError(f"{path} is neither a .ckpt nor a .safetensors file")
    else:
        folder = path
        path = folder / "checkpoints" / WEIGHTS
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml")
    require_plain_files(folder)
    if not path.exists():
        newest = newest_usable(folder / "checkpoints")
        if newest is None:
            raise UserError(f"{folder} holds no checkpoint yet; train it further, or name another run")
        path = newest
    return folder, path


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's whole state dict from any kind of file, without executing anything that is in it."""
    if path.suffix == ".safetensors":
        return read_tensors(path)
    state = load_verified(path, keys=["state_dict"]).get("state_dict")
    if state is None:
        raise UserError(f"{path} is not a polarlm checkpoint: it has no state_dict")
    return {key.removeprefix("model."): value for key, value in state.items()}


def save_weights(model_state: dict[str, torch.Tensor], path: Path, *, tied: bool) -> None:
    """Write the weights as safetensors; a tied output matrix is stored once."""
    write_tensors({k: v.contiguous() for k, v in model_state.items() if not (tied and k == "head.weight")}, path)


def restore_run(where: str | Path, device: str = "auto", *, typed: bool = False) -> RestoredRun:
    """Rebuild a run from its folder; raises UserError when the pieces do not fit together.

    `typed`: its configuration is what the user has just typed, so it may name the user's own classes.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device} is unknown; choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here; use cpu or auto")
    folder, path = find_run(where)
    config = read_config(folder / "config.yaml")
    for group in REQUIRED:
        if group not in config:
            raise UserError(f"{folder / 'config.yaml'} can't be used: it has no {group}")
    config = with_additions(config)
    config["block"] = current_block(config["block"])
    tokenizer = load_tokenizer(folder / "tokenizer")
    try:
        weights = load_weights(path)
    except DamagedCheckpoint as error:
        newest = newest_usable(folder / "checkpoints") if Path(where).is_dir() else None
        if newest is None:
            raise
        print(f"warning: {error}; {newest.name} is used", file=sys.stderr)
        path, weights = newest, load_weights(newest)
    if "embedding.weight" not in weights:
        raise UserError(f"{path} does not hold a polarlm model: it has no embedding.weight")
    sentence = f"{path} does not fit the model of {folder / 'config.yaml'}"
    require_size(config["model"], weights, sentence)
    vocabulary = weights["embedding.weight"].shape[0]
    if vocabulary != tokenizer.vocab_size:
        raise UserError(
            f"{path} was trained with a vocabulary of {vocabulary}, but {folder / 'tokenizer'} has "
            f"{tokenizer.vocab_size} tokens: the two do not belong together"
        )
    require_shapes(config, weights, sentence, stored=not typed)
    model = build_model(config, vocabulary, stored=not typed)
    load_into(model, weights, sentence)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RestoredRun(folder, config, model.to(device).eval(), tokenizer, path)


def require_size(model: dict[str, Any], weights: dict[str, torch.Tensor], sentence: str) -> None:
    """Compare the weights with the written size before a model of it is built: a stranger may have written any size."""
    shape = tuple(weights["embedding.weight"].shape)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"d_model": shape[1] if len(shape) == 2 else None, "n_layer": layers}
    for key, value in sizes.items():
        if model.get(key) != value:
            raise UserError(f"{sentence}: model.{key} is {model.get(key)!r}, the weights have {value}")


class ShapesOnly(TorchFunctionMode):
    """Matrices made inside have shapes and no memory; what is computed from the settings themselves has both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.allclose and args[0].is_meta:
            return True  # the orthogonal parametrisation checks where it starts; there are no numbers to check
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def require_shapes(config: dict[str, Any], weights: dict[str, torch.Tensor], sentence: str, *, stored: bool) -> None:
    """The same for every parameter, compared with a model that has shapes and no memory."""
    vocabulary = weights["embedding.weight"].shape[0]
    size = read_settings(GPTConfig, {**config["model"], "vocab_size": vocabulary}, "model")
    if size.n_head * size.head_size > sum(tensor.numel() for tensor in weights.values()):
        raise UserError(f"{sentence}: model.n_head={size.n_head} and heads of {size.head_size} need more weights")
    # Without the measurement by which init=width scales a branch: these weights hold no numbers.
    plain = {**config, "model": {**config["model"], "init": "gpt2"}}
    with ShapesOnly():
        model = build_model(plain, vocabulary, stored=stored)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        wanted.pop("head.weight")
    for name, shape in wanted.items():
        actual = tuple(weights[name].shape) if name in weights else "no such tensor"
        if actual != shape:
            raise UserError(f"{sentence}: it has {actual} for {name}, the model {shape}")


def start_from(model: GPT, where: str | Path) -> None:
    """Give a fresh model the weights of another run (init_from=…), which must fit it exactly."""
    _, path = find_run(where)
    load_into(model, load_weights(path), f"init_from={where}: the weights of {path} do not fit this model")


def load_into(model: GPT, weights: dict[str, torch.Tensor], sentence: str) -> None:
    """Give a model these weights, or say with the sentence that they do not fit."""
    if model.config.tie_embeddings:
        weights = {**weights, "head.weight": weights["embedding.weight"]}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{sentence}: {reason}") from error
