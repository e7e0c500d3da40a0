"""Runs before the libraries are imported: faster imports of Lightning, and checks of the processor.

Lightning imports torchmetrics, which imports scipy and transformers, when they are installed, for metrics that nothing
here uses: half of the time until a command begins to work. Programs say `skip_unused_libraries()` before they import
Lightning; a notebook that imports polarlm gets the whole torchmetrics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED = ("scipy", "transformers", "matplotlib")


def skip_unused_libraries() -> None:
    """Let torchmetrics, when it is imported later, believe that they are not installed; nobody else is told so."""
    if "torchmetrics" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchmetrics as everyone else would, and looks after its execution; then it is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchmetrics":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _unused_seem_absent():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _unused_seem_absent() -> Iterator[None]:
    import lightning_utilities.core.imports

    known: Any = lightning_utilities.core.imports
    if not hasattr(known, "package_available") or not hasattr(known.RequirementCache, "_check_requirement"):
        yield  # another version asks in another way: everything is imported, as without us
        return
    available, check = known.package_available, known.RequirementCache._check_requirement

    def package_available(name: str) -> bool:
        return name not in UNUSED and available(name)

    def check_requirement(self: Any) -> None:
        if str(self.requirement).startswith(UNUSED):
            self.available, self.message = False, f"{self.requirement} is left out by polarlm.startup"
        else:
            check(self)

    known.package_available, known.RequirementCache._check_requirement = package_available, check_requirement
    try:
        yield
    finally:
        known.package_available, known.RequirementCache._check_requirement = available, check


# -- the processor, and the instructions that it announces but cannot carry out ---------------------------------------


CPUINFO = Path("/proc/cpuinfo")
TILE_LEAF = 0x1D  # the CPUID leaf that describes AMX tiles


def processor() -> str:
    """What -march=native depends on: a cache on a shared home must not serve another machine's instructions."""
    try:
        lines = CPUINFO.read_text().splitlines()
        keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))
    except OSError:
        return platform.processor() + platform.machine()


def avoid_broken_tiles() -> None:
    """Keep oneDNN from AMX where the processor has it but a hypervisor hides the size of its tiles.

    oneDNN then configures no tile, and the first bf16 product kills the process (SIGILL). It reads the variable once,
    before its first product. A value that the user has set stays.
    """
    try:
        with CPUINFO.open() as file:
            fields = dict(_field(line) for line in iter(file.readline, "\n") if ":" in line)  # the first processor
    except OSError:
        return
    level = fields.get("cpuid level", "")
    if "amx_tile" in fields.get("flags", "").split() and level.isdecimal() and int(level) < TILE_LEAF:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
