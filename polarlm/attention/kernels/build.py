"""Compiling the native kernels once per machine and finding them again: seconds at first use, silent afterwards."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

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
CACHE_VARIABLE = "POLARLM_CACHE"  # folder for compiled code; default: ~/.cache/polarlm


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
    name = f"native-{real}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    try:
        folder = cache_folder()
        path = folder / name
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one run: one compiles, the others wait and load
            if not path.exists():
                _compile(compiler, real, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(str(error)) from error


def _compile(compiler: str, real: str, path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as unfinished:
        command = [compiler, *FLAGS, f"-DREAL={real}", str(SOURCES / "native.cpp"), "-o", unfinished.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(unfinished.name)
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise NotBuilt(f"{Path(compiler).name} failed: {message}")
    os.replace(unfinished.name, path)


def cache_folder() -> Path:
    """The cache folder, or a private temporary one where the user's home cannot be written."""
    chosen = os.environ.get(CACHE_VARIABLE)
    standard = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polarlm"
    folder = Path(chosen) if chosen else standard
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        if chosen:
            raise
    folder = Path(tempfile.gettempdir()) / f"polarlm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # loading code from a folder somebody else made would run theirs
        raise NotBuilt(f"{folder} belongs to another user; set {CACHE_VARIABLE}")
    return folder


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def processor() -> str:
    """What -march=native depends on: a cache on a shared home must not serve another machine's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))
    except OSError:
        return platform.processor() + platform.machine()
