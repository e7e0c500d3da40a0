"""The processor: its name, and the instructions that it announces but cannot carry out."""

from __future__ import annotations

import os
import platform
from pathlib import Path

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
