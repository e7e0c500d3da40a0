"""Where things lie. Runs and caches are below the current folder; what is shipped is found from here."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "POLARLM_CACHE"  # compiled code lies in a private folder of it; default: ~/.cache/polarlm
_PACKAGE = Path(__file__).resolve().parent
# A wheel carries the configuration inside the package; a checkout has it beside the package, at the top.
CONFIGS = next(
    (folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (folder / "train.yaml").is_file()),
    _PACKAGE / "configs",
)


def config_folders() -> list[Path]:
    """Where yaml files are chosen from: ours, and the user's own."""
    return [CONFIGS, *([folder] if (folder := own_configs()) else [])]


def choices_of(group: str) -> list[str]:
    """The names that `<group>=` knows."""
    return sorted({path.stem for folder in config_folders() for path in (folder / group).glob("*.yaml")})


def own_configs() -> Path | None:
    """A folder `configs` where the command is typed: its choices join ours (configs/block/mine.yaml: block=mine)."""
    folder = Path.cwd() / "configs"
    return folder.resolve() if folder.is_dir() and folder.resolve() != CONFIGS else None


def shipped_default(key: str, choices: dict[str, Any]) -> Any:
    """The default of a dotted key such as `block.nu` under the choices of a run (block=polar), or None if unknown."""
    group, _, name = key.partition(".")
    choice = choices.get(group)
    value: Any = shipped_settings(group, str(choice)) if choice and name else {}
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value["kind"] if isinstance(value, dict) and "kind" in value else value  # of a block's part: its choice


@cache
def shipped_settings(group: str, choice: str) -> dict[str, Any]:
    """The settings of configs/<group>/<choice>.yaml on top of those of the files that it starts from."""
    path = CONFIGS / group / f"{choice}.yaml"
    if Path(choice).name != choice or not os.path.isfile(path):
        return {}  # a choice of the user's own, or of another version
    from omegaconf import OmegaConf

    settings: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True) or {}  # without recipe
    merged: dict[str, Any] = {}
    for base in settings.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            merged |= shipped_settings(group, base)
        for part, name in base.items() if isinstance(base, dict) and group == "block" else ():  # its parts
            part = part.removeprefix("override ")
            merged[part] = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / part / f"{name}.yaml"))
    for key, value in settings.items():
        merged[str(key)] = {**merged[str(key)], **value} if isinstance(merged.get(str(key)), dict) else value
    return merged


def cache_folder() -> Path:
    """A folder for compiled code that only this user can write, in the first place that allows one.

    Loading a file that somebody else could have written would run their code: $POLARLM_CACHE may be shared.
    """
    home = os.path.expanduser("~")  # stays "~" for a user without HOME and without an entry in /etc/passwd
    standard = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home != "~" else None)
    bases = [os.environ.get(CACHE_VARIABLE), standard and f"{standard}/polarlm", tempfile.gettempdir()]
    for base in filter(None, bases):
        folder = Path(base) / f"polarlm-native-{os.getuid()}"
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private(folder) and os.access(folder, os.W_OK):
                return folder
    raise PermissionError(f"no folder for compiled code is writable only by you; set {CACHE_VARIABLE} to one")


def _is_private(folder: Path) -> bool:
    """Whether nobody else can write here or put another folder in its place."""
    own, above = folder.lstat(), folder.parent.stat()
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o022
    shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX  # others could rename it
    return private and above.st_uid in (0, os.getuid()) and not shared
