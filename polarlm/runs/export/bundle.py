"""The source files a model needs, as flat files that import each other: code that travels with the weights.

transformers copies modeling_*.py and the files it imports as `from .name import …`, from one flat folder, and refuses a
file that imports a package which is not installed. So every module of polarlm that is reached becomes
`polarlm_<path>.py`, and the fast kernels (which need compilers and Triton) stay at home: the reference remains.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

# Of the kernels only what defines a call and computes it plainly.
KERNELS = "polarlm.attention.kernels"
KEPT_KERNELS = {KERNELS, *(f"{KERNELS}.{name}" for name in ("call", "noise", "reference", "consensus"))}
ABSENT = '''
class _Absent:
    """A kernel that does not travel: asked whether it can (`…obstacle`, `takes_…`) it says no; called, why."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *arguments, **options):
        if self.name.endswith("obstacle"):
            return f"{self.name}: not part of an exported model"
        if self.name.startswith("takes_"):
            return False
        raise RuntimeError(f"{self.name} is not part of an exported model; its backend is 'reference'")
'''


def bundle(entry: str, source: str) -> dict[str, str]:
    """{file name: text} of a module given as text, and of every polarlm module it needs."""
    done: dict[str, str] = {}
    waiting = [(entry, source)]
    while waiting:
        module, text = waiting.pop()
        rewritten, needed = rewrite(module, text)
        done[module] = rewritten
        waiting += [(name, _source(name)) for name in needed if name not in done and name not in dict(waiting)]
    return {f"{flat_module_name(module)}.py": text for module, text in done.items()}


def flat_module_name(module: str) -> str:
    """polarlm.attention.polar -> polarlm_attention_polar."""
    return module.replace(".", "_")


def rewrite(module: str, text: str) -> tuple[str, list[str]]:
    """(the text with imports of polarlm turned into flat ones, the modules they name)."""
    lines = text.splitlines()
    needed: list[str] = []
    absent = False
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(imports, key=lambda node: -node.lineno):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] == "polarlm" for alias in node.names):
                raise ValueError(f"{module} imports polarlm as a whole; an export needs `from … import …`")
            continue
        origin = _origin(module, node)
        if origin.split(".")[0] != "polarlm":
            continue
        indent = lines[node.lineno - 1][: node.col_offset]
        new = []
        for alias in node.names:
            name = alias.asname or alias.name
            home = _home(origin, alias.name)
            if home.startswith(f"{KERNELS}.") and home not in KEPT_KERNELS:
                new.append(f'{indent}{name} = _Absent("{alias.name}")')
                absent = True
            else:
                needed.append(home)
                renamed = f" as {alias.asname}" if alias.asname else ""
                new.append(f"{indent}from .{flat_module_name(home)} import {alias.name}{renamed}")
        lines[node.lineno - 1 : node.end_lineno] = new
    if absent:
        lines = _after_imports(lines)
    return "\n".join(lines) + "\n", list(dict.fromkeys(needed))


def _after_imports(lines: list[str]) -> list[str]:
    """The lines with the stand-in defined before its first use."""
    first = next(n for n, line in enumerate(lines) if "_Absent(" in line and not line.startswith(" "))
    return [*lines[:first], *ABSENT.strip().splitlines(), "", "", *lines[first:]]


def _origin(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module if _is_package(module) else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _home(origin: str, name: str) -> str:
    """The module that defines a name which a package only hands on; the package itself for its own."""
    if not _is_package(origin):
        return origin
    thing = getattr(importlib.import_module(origin), name)
    if inspect.ismodule(thing):
        raise ValueError(f"`from {origin} import {name}` imports a module; an export needs a name in it")
    home = getattr(thing, "__module__", origin)
    return home if home.startswith("polarlm.") else origin


def _is_package(module: str) -> bool:
    spec = importlib.util.find_spec(module) if module.startswith("polarlm") else None
    return spec is not None and spec.submodule_search_locations is not None


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
