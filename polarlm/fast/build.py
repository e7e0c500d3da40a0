"""Compiling the native kernels once per machine and finding them again: seconds at first use, silent afterwards."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from polarlm.locations import cache_folder
from polarlm.startup import processor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-shared",
)


class NotBuilt(Exception):
    """Why there is no native library, in words for a warning."""


@functools.cache
def library(real: str) -> ctypes.CDLL:
    """The compiled kernels for `float` or `double`; raises NotBuilt with the reason where that is impossible."""
    if fcntl is None:
        raise NotBuilt("the native kernels are built on Linux and macOS only")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NotBuilt("no C++ compiler was found (install g++ or set CXX)")
    sources = sorted(SOURCES.iterdir())
    parts = [
        *(path.read_bytes() for path in sources),
        *map(str.encode, (*FLAGS, real, _version(compiler), processor())),
    ]
    name = f"{real}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"
    try:
        folder = cache_folder()
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(lock, "rb"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one run: one compiles, the others wait and load
            path = next(filter(_is_intact, folder.glob(f"{name}-*.so")), None) or _compile(compiler, real, folder, name)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(str(error)) from error


def _is_intact(path: Path) -> bool:
    """Whether the file is the one that was compiled: the end of its name is the hash of its content."""
    return not path.is_symlink() and path.stem.endswith(f"-{_content(path)}")


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _compile(compiler: str, real: str, folder: Path, name: str) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".new", delete=False) as unfinished:
        command = [compiler, *FLAGS, f"-DREAL={real}", str(SOURCES / "native.cpp"), "-o", unfinished.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(unfinished.name)
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise NotBuilt(f"{Path(compiler).name} failed: {message}")
    path = folder / f"{name}-{_content(Path(unfinished.name))}.so"
    os.replace(unfinished.name, path)
    return path


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
