"""Where things lie. Runs and caches are below the current folder; what is shipped is found from here."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import tempfile
from pathlib import Path

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
    raise PermissionError(f"no folder for compiled code that only you can write; set {CACHE_VARIABLE} to one")


def _is_private(folder: Path) -> bool:
    """Whether nobody else can write here or put another folder in its place."""
    own, above = folder.lstat(), folder.parent.stat()
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o022
    shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX  # others could rename it
    return private and above.st_uid in (0, os.getuid()) and not shared


def processor() -> str:
    """What -march=native depends on: a cache on a shared home must not serve another machine's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))
    except OSError:
        return platform.processor() + platform.machine()
