"""Where and with what a run is made: versions, code, hardware, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Versions, code version, hardware and command: what a stranger needs to repeat the run."""
    from importlib import metadata

    import torch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    commit, dirty = code_version(Path(__file__).resolve().parents[1])
    packages = ("polarlm", "torch", "lightning", "hydra-core", "datasets", "tokenizers", "tiktoken", "numpy", "wandb")
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "git_commit": commit,
        "git_dirty": dirty,
        "platform": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def code_version(package: Path) -> tuple[str | None, bool | None]:
    """(commit, whether files of the package differ from it); None where no repository holds this package.

    Only the package counts: settings stand in the run's config.yaml, and a study writes its rows beside the code. An
    installed package may lie inside somebody's repository, whose commit says nothing about it.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    status = git("status", "--porcelain", "--", ".")
    return git("rev-parse", "HEAD"), bool(status) if status is not None else None
