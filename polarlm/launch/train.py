"""From a composed configuration to a training run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from polarlm.data.early import require_enough_text, require_tokenizer
from polarlm.data.source import require_text
from polarlm.errors import UserError
from polarlm.jobs.processes import start_job, stop_job
from polarlm.launch.check import check_train, require_memory
from polarlm.runs.files import read_json
from polarlm.runs.identity import default_name
from polarlm.runs.sweeps import (
    RESULT_VARIABLE,
    SWEPT_VARIABLE,
    command_overrides,
    find_finished,
    sweep_group,
    swept_values,
)
from polarlm.training.loggers.packages import require_packages
from polarlm.visible import fitted


def train_job(cfg: DictConfig) -> float:
    """Train, evaluate and describe one run; returns the validation loss."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config = resolve(cfg)
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN or SWEPT_VARIABLE in os.environ
    if in_sweep and config["resume"] != "never" and (finished := find_finished(config)) is not None:
        return already_finished(finished)
    require_text(config["data"])
    require_memory(config)
    require_packages(config)
    require_tokenizer(config["tokenizer"])
    require_enough_text(config["data"], config["tokenizer"], config["model"]["context"])
    if hydra.mode == RunMode.MULTIRUN:
        if config["trainer"]["devices"] != 1 or config["trainer"]["nodes"] != 1:
            return train_in_own_process(list(hydra.overrides.task))
        try:
            return train_and_print(config)
        finally:
            forget_compiled_code()  # compiled code of one job must not reach the next
    return train_and_print(config)


def forget_compiled_code() -> None:
    """Empty the compiler's memory."""
    import torch

    torch._dynamo.reset()


def already_finished(folder: Path) -> float:
    """A sweep started again trains nothing twice: the job's result is the finished run's."""
    print(f"Already finished: {folder}", file=sys.stderr, flush=True)
    if RESULT_VARIABLE in os.environ:
        Path(os.environ[RESULT_VARIABLE]).write_text(str(folder.resolve()), encoding="utf-8")
    return float(read_json(folder / "summary.json")["val/loss"])


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, with the chosen names of every group beside it."""
    from hydra.core.hydra_config import HydraConfig

    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise UserError(f"{', '.join(sorted(missing))} must be given, for example {sorted(missing)[0]}=…")
    config = check_train(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    choices = HydraConfig.get().runtime.choices
    config["choices"] = {k: v for k, v in choices.items() if "hydra" not in k and v is not None}
    config["choices"]["model"] = size_name(config["model"], choices["model"])
    overrides, swept = command_overrides()
    config["group"] = config["group"] or sweep_group(config, overrides, swept)
    if config["name"] is None and (values := swept_values(overrides, swept)):
        config["name"] = default_name(config, values)
    return config


SIZES = ("d_model", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn", "ffn_mult", "ffn_width")


def size_name(model: dict[str, Any], choice: str) -> str:
    """The chosen size's name, or layers × width where a run has changed what the name stands for."""
    from polarlm.verdict.defaults import shipped_settings

    named = shipped_settings("model", choice)  # of a user's own size nothing: whatever it says is what it stands for
    same = all(model.get(key) == named.get(key, model.get(key)) for key in SIZES)
    return choice if same else f"{model['n_layer']}x{model['d_model']}"


def train_and_print(config: dict[str, Any]) -> float:
    """Train in this process and print the final table (rank 0); returns the validation loss."""
    if sys.stderr.isatty():  # importing torch and Lightning is silent and takes seconds; the next line replaces this
        print("starting …", end="\r", file=sys.stderr, flush=True)
    from polarlm.launch.match import apply_match
    from polarlm.launch.table import final_table, next_steps
    from polarlm.report.figure import write_summary_png
    from polarlm.training.loop import train_run

    result = train_run(apply_match(config), pictures=write_summary_png)
    if result is None:
        return float("nan")
    print(fitted(final_table(result.summary, result.folder, result.summary["sample"]), sys.stdout, hang=14))
    if config["group"] is None:  # a sweep ends with its own table
        print(next_steps(result.folder))
    return float(result.summary["val/loss"])


def train_in_own_process(overrides: list[str]) -> float:
    """A sweep's job with several processes: started on its own, so that its ranks do not start the sweep again."""
    from hydra.core.hydra_config import HydraConfig

    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "folder"
        environment = {RESULT_VARIABLE: str(result), SWEPT_VARIABLE: " ".join(sorted(command_overrides()[1]))}
        process = start_job([*overrides, f"hydra.job.name={HydraConfig.get().job.name}"], environment)
        try:
            code = process.wait()
        finally:
            stop_job(process)
        if code:
            raise UserError(f"the job ended with exit code {code}; its own output above says why")
        folder = Path(result.read_text(encoding="utf-8"))
    return float(read_json(folder / "summary.json")["val/loss"])
