"""Where things lie. Runs and caches are below the current folder; what is shipped is found from here."""

from __future__ import annotations

from pathlib import Path

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
