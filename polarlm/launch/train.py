"""From a composed configuration to a training run, and the table at its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from polarlm.data.corpus import require_enough_text, require_tokenizer
from polarlm.data.source import require_text
from polarlm.errors import UserError, typed_command
from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.launch.check import check_train, require_memory
from polarlm.launch.overrides import named_choices
from polarlm.printing import clock, fitted, indented, short
from polarlm.runs.files import read_json
from polarlm.runs.identity import (
    RESULT_VARIABLE,
    SWEPT_VARIABLE,
    command_overrides,
    default_name,
    find_finished,
    sweep_group,
    swept_values,
)
from polarlm.targets import require_packages


def train_job(cfg: DictConfig) -> float:
    """Train, evaluate and describe one run; returns the validation loss."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config = resolve(cfg)
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN or SWEPT_VARIABLE in os.environ
    if in_sweep and config["resume"] != "never" and (finished := find_finished(config)) is not None:
        return already_finished(finished)
    require_start(config.get("init_from"))
    require_text(config["data"])
    require_memory(config)
    require_packages(config)
    require_tokenizer(config["tokenizer"])
    require_enough_text(config["data"], config["tokenizer"], config["model"]["context"])
    if hydra.mode == RunMode.MULTIRUN and (config["trainer"]["devices"], config["trainer"]["nodes"]) != (1, 1):
        raise UserError("trainer.devices and trainer.nodes above 1 need hydra/launcher=serial, local or slurm")
    return train_and_print(config)


def require_start(where: str | None) -> None:
    """Refuse an init_from that can hold no weights before a corpus is prepared for it."""
    if where is None:
        return
    weights = os.path.isfile(where) and where.endswith((".ckpt", ".safetensors"))
    if not weights and not os.path.isfile(os.path.join(where, "config.yaml")):
        raise UserError(
            f"init_from={where} holds no run; give a run folder, or a .ckpt or .safetensors file inside one."
        )


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
    config["choices"] = named_choices(choices)
    config["choices"]["model"] = size_name(config["model"], choices["model"])
    overrides, swept = command_overrides()
    config["group"] = config["group"] or sweep_group(config, overrides, swept)
    if config["name"] is None and (values := swept_values(overrides, swept)):
        config["name"] = default_name(config, values)
    return config


SIZES = ("d_model", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn", "ffn_mult", "ffn_width")


def size_name(model: dict[str, Any], choice: str) -> str:
    """The chosen size's name, or layers × width where a run has changed what the name stands for."""
    from polarlm.locations import shipped_settings

    named = shipped_settings("model", choice)  # of a user's own size nothing: whatever it says is what it stands for
    same = all(model.get(key) == named.get(key, model.get(key)) for key in SIZES)
    return choice if same else f"{model['n_layer']}x{model['d_model']}"


def train_and_print(config: dict[str, Any]) -> float:
    """Train in this process and print the final table (rank 0); returns the validation loss."""
    if sys.stderr.isatty():  # importing torch and Lightning is silent and takes seconds; the next line replaces this
        print("starting …", end="\r", file=sys.stderr, flush=True)
    from polarlm.launch.match import apply_match
    from polarlm.report.pictures import write_summary_png
    from polarlm.training.loop import train_run

    result = train_run(apply_match(config), pictures=write_summary_png)
    if result is None:
        return float("nan")
    print(fitted(final_table(result.summary, result.folder, result.summary["sample"]), sys.stdout, hang=14))
    if config["group"] is None:  # a sweep ends with its own table
        print(next_steps(result.folder))
    return float(result.summary["val/loss"])


# -- the table at the end of a run ------------------------------------------------------------------------------------


def final_table(summary: dict[str, Any], folder: Path, sample: str | None) -> str:
    """Plain text: what was reached, against what, how fast, where it lies, and how the model writes."""
    lines = metric_lines(summary)
    facts = [
        ("block", str(summary["block"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("tokens", speed(summary)),
        ("compute", f"{spaced(short(summary['flops_per_token']))}FLOPs per token" + share_of_peak(summary.get("mfu"))),
        ("step", step_split(summary.get("step_seconds") or {})),
        ("run folder", str(folder)),
        ("pictures", ", ".join(str(p) for p in sorted(folder.glob("*.png"))) or "none"),
    ]
    lines += undertrained_note(summary)
    lines += ["", *(f"  {name:<10}  {value}" for name, value in facts)]
    if sample:
        lines += ["", "  sample", *(f"    {line}" for line in sample.splitlines())]
    return "\n".join(lines)


def next_steps(folder: Path) -> str:
    """What to type after a single run: write text, evaluate, compare."""
    commands = [
        (f'python -m polarlm generate {folder} --prompt "The "', "generate more text"),
        (f"{typed_command('eval')} checkpoint={folder} protocol=length", "evaluate on longer contexts"),
        (f"{typed_command('train')} -m block=standard,xsa,polar seed=1,2,3", "train three blocks on three seeds"),
        (f"python -m polarlm compare {folder.parent}", "compare them in report.html"),
    ]
    return "\n".join(["", "  next", *(f"    {command}\n      {why}" for command, why in commands)])


def metric_lines(summary: dict[str, Any]) -> list[str]:
    """A row per judged split and per baseline, a column per metric that any of them has."""
    numbers = {
        name: {metric.name: summary.get(f"{split}/{metric.name}") for metric in METRICS}
        for split, name in (("val", "validation"), ("test", "test"))
        if f"{split}/loss" in summary
    }
    numbers |= {f"{name} baseline": values for name, values in (summary.get("baselines") or {}).items()}
    shown = [m for m in METRICS if any(values.get(m.name) is not None for values in numbers.values())]
    rows = [["", *(metric.short for metric in shown)]]
    rows += [[name, *(formatted(m.name, values.get(m.name)) for m in shown)] for name, values in numbers.items()]
    return indented(rows)


def undertrained_note(summary: dict[str, Any]) -> list[str]:
    """A warning where counting pairs of tokens predicts better than the model does."""
    loss, bigram = summary.get("val/loss"), ((summary.get("baselines") or {}).get("bigram") or {}).get("loss")
    if loss is None or bigram is None or loss < bigram:
        return []
    return [
        "",
        "  Not yet better than the bigram table: undertrained, more steps needed before blocks can be compared.",
    ]


def spaced(number: str) -> str:
    """'1.5M' → '1.5 M', where a unit follows."""
    return f"{number[:-1]} {number[-1]}" if number[-1].isalpha() else f"{number} "


def speed(summary: dict[str, Any]) -> str:
    """Tokens, the seconds their training took, the speed of its steady state; other time is told apart."""
    seconds, total = summary.get("training_seconds"), summary["seconds"]
    if not seconds:
        return f"{summary['tokens']:,} in {clock(total)}"
    rate = summary.get("tokens_per_second")
    text = f"{summary['tokens']:,} in {clock(seconds)} of training"
    text += f" ({short(rate)} tokens/s)" if rate else " (speed n/a: the first step only warms up)"
    if compiling := summary.get("compile_seconds"):
        text += f", {clock(compiling)} of it compiling"
    return f"{text}, {clock(total - seconds)} more for validation and diagnostics"


def share_of_peak(mfu: float | None) -> str:
    """', 12 % of the hardware's peak', or nothing where that is not known."""
    return "" if mfu is None else f", {100 * mfu:.0f} % of the hardware's peak"


def step_split(parts: dict[str, float | None]) -> str:
    """'data 1 %, forward 30 %, …' of a typical step."""
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    total = sum(known.values())
    if not total:
        return "n/a"
    return f"{1000 * total:.0f} ms: " + ", ".join(
        f"{name} {100 * value / total:.0f} %" for name, value in known.items()
    )
