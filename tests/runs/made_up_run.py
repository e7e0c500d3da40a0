"""A run folder as training leaves it, without the training."""

from pathlib import Path
from typing import Any

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from polarlm.block_keys import current_block, expanded, flat_block, is_parted
from polarlm.data.tokenizer import ByteTokenizer
from polarlm.locations import CONFIGS
from polarlm.model.build import build_model
from polarlm.runs.files import write_json
from polarlm.runs.restore import RestoredRun, restore_run, save_weights

SIZES = {"context": 24, "d_model": 32, "n_layer": 2, "n_head": 2}


def block_settings(block: str) -> dict[str, Any]:
    """configs/block/<block>.yaml with what it inherits."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("train", expanded([f"block={block}"])).block, resolve=True)


def made_up_run(
    folder: Path, block: str = "standard", switches: dict[str, Any] | None = None, **model: Any
) -> RestoredRun:
    """A restored run of any block in configs/block, with weights far enough from zero to have opinions."""
    torch.manual_seed(3)
    options = block_settings(block)
    if switches and is_parted(options):  # by their old names
        switches = {"frame": options["frame"]} | switches
        options = current_block(flat_block(options) | switches)
    else:
        options |= switches or {}
    config = {
        "seed": 1,
        "block": options,
        "model": {**SIZES, **model},
        "data": {"mask_documents": False},
        "tokenizer": {"kind": "byte"},
        "trainer": {"batch_tokens": 96, "micro_batch_tokens": 96, "precision": "32-true"},
        "choices": {"block": block, "model": "2x32", "data": "text", "tokenizer": "byte"},
    }
    built = build_model(config, 257)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3 if "embedding" in name else 0.15)
            elif "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
    (folder / "checkpoints").mkdir(parents=True)
    ByteTokenizer().save(folder / "tokenizer")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_json(folder / "summary.json", {"val/loss": 1.5, "val/bits_per_byte": 2.1, "tokens": 960, "seconds": 3.0})
    save_weights(built.state_dict(), folder / "checkpoints" / "model.safetensors", tied=built.config.tie_embeddings)
    return restore_run(folder, "cpu")
