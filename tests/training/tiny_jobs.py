"""Small real training jobs inside the test process: composed by Hydra, fitted by our own path."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from polarlm.block_keys import expanded

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "data=text", "tokenizer=byte", "data.split.val=0.03",
    "model.d_model=16", "model.n_layer=2", "model.n_head=2", "model.context=16",
    "trainer.max_steps=3", "trainer.batch_tokens=128", "trainer.micro_batch_tokens=64", "trainer.log_every=1",
    "trainer.val_every=0", "trainer.checkpoint_every=1000", "trainer.accelerator=cpu", "trainer.precision=32-true",
    "data.eval_tokens=256", "diagnostics=off", "logger=none",
)  # fmt: skip


@functools.cache
def _corpus(folder: Path) -> Path:
    text = "".join(f"{i * i % 97} times the river turned, and {i % 13} lamps were lit.\n\n" for i in range(100))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.txt"
    path.write_text(text)
    return path


def composed(place: Path, *overrides: str) -> dict[str, Any]:
    """The resolved configuration of a tiny run whose cache and corpus lie in `place`."""
    where = [f"data.path={_corpus(place)}", f"cache_dir={place}/cache", f"runs_dir={place}/runs"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=expanded([*TINY, *where, *overrides]), return_hydra_config=True)
        choices = {k: v for k, v in cfg.hydra.runtime.choices.items() if "hydra" not in k and v is not None}
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
    return {**OmegaConf.to_container(cfg, resolve=True), "choices": choices}  # type: ignore[dict-item]


def fitted(place: Path, folder: Path, *overrides: str, extra: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """Fit a tiny job into `folder`; returns the rows of its metrics.jsonl."""
    from polarlm.training.job import build_job
    from polarlm.training.loop import fit, quiet_libraries

    quiet_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    fit(build_job(composed(place, *overrides)), folder, extra=extra)
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
