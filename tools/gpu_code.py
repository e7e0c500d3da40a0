"""Which functions of polarlm name a GPU: `python -m tools.gpu_code` lists them as docs/scaling.md does.

Nobody here has a GPU, so these are the functions with lines that have never executed for real; a test holds the
table in the docs to this list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("cuda", "nccl", "pin_memory", "is_cuda", "triton_kernels")


def functions_of(path: Path) -> Iterator[str]:
    """`file::function` for every outermost function (or class body) whose code, not its docstring, names a GPU."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        for owner, name in _definitions(node):
            if any(_names_a_gpu(part) for part in _code(owner)):
                yield f"{path.relative_to(ROOT)}::{name}"


def _definitions(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef):
        yield node, node.name
    elif isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                yield inner, f"{node.name}.{inner.name}"


def _code(owner: ast.AST) -> Iterator[ast.AST]:
    body = owner.body  # type: ignore[attr-defined]
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    for statement in body[1:] if documented else body:
        yield from ast.walk(statement)


def _names_a_gpu(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value in ("cuda", "nccl")
    if isinstance(node, ast.Attribute):
        return node.attr in WORDS
    return isinstance(node, ast.ImportFrom) and any(alias.name in WORDS for alias in node.names)


def gpu_functions() -> list[str]:
    """All of them, sorted."""
    return sorted(name for path in (ROOT / "polarlm").rglob("*.py") for name in functions_of(path))


if __name__ == "__main__":
    print("\n".join(gpu_functions()))
