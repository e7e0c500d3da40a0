"""`train --help` and `eval --help`: the text of the yaml, the choices that can be typed, the command as typed."""

from __future__ import annotations

import shutil
import string
import textwrap
from typing import Any

from polarlm.errors import typed_command


def help_text(loader: Any, config_name: str) -> str:
    """What a person reads who asks how a command is used."""
    from polarlm.launch.overrides import compose

    hydra = compose(loader, config_name, []).hydra
    # Groups of Hydra's and of other commands (`polarlm study`) cannot be chosen here.
    names = sorted(name for name in hydra.runtime.choices if not name.startswith("hydra"))
    lines = [_choices(name, sorted(loader.get_group_options(name))) for name in names]
    if config_name == "train":
        lines.append(_choices("hydra/launcher", ["basic", "joblib", "local", "slurm"]))  # how a sweep's jobs are run
    text = string.Template(hydra.help.template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines) + "\n")
    for verb in ("train", "eval"):
        text = text.replace(f"python {verb}.py", typed_command(verb))
    return text


def _choices(name: str, options: list[str]) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    return textwrap.fill(
        f"{name}: {', '.join(options)}",
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
