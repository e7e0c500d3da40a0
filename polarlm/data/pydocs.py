"""The embedded corpus: the documentation text of the Python installation itself, read without importing any of it."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from polarlm.data.atomic import explained, locked, write_beside

EXTRACTOR = 2  # raise it when the rules below change: the cached text is then written anew
_SKIPPED = ("test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__", "pydoc_data")
_GRAMMAR = re.compile(r"::=|^\s*\|", re.MULTILINE)


def pydocs_file(cache_dir: Path) -> Path:
    """The cached jsonl of the embedded corpus, extracted on first use (some seconds)."""
    target = cache_dir / f"pydocs-{platform.python_implementation()}-{platform.python_version()}-{EXTRACTOR}.jsonl"
    if target.exists():
        return target
    with explained(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(target):
        if not target.exists():
            lines = (json.dumps({"title": title, "text": text}) + "\n" for title, text in extract())
            write_beside(target, "".join(lines).encode())
    return target


def extract() -> Iterator[tuple[str, str]]:
    """Documents (title, text) in a fixed order, no paragraph occurring twice."""
    seen: set[str] = set()
    for title, text in _raw_documents():
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if not key or ">>>" in paragraph or _GRAMMAR.search(paragraph) or key in seen:
                continue
            seen.add(key)
            kept.append(paragraph.rstrip())
        document = "\n\n".join(kept).strip("\n")
        if len(document) >= 80:
            yield title, document + "\n"


def _raw_documents() -> Iterator[tuple[str, str]]:
    from pydoc_data import topics  # plain data: one dictionary of strings

    for name in sorted(topics.topics):
        yield f"topic {name}", topics.topics[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                docs = _docstrings(path)
                if docs:
                    yield str(path.relative_to(library)), "\n\n".join(docs)


def _docstrings(path: Path) -> list[str]:
    try:
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not our subject
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return []
    texts = (ast.get_docstring(node) for node in _definitions(tree))
    return [text for text in texts if text and "\x00" not in text]


def _definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Module, classes and functions in the order of the source; statements only, since ast.walk takes twice as long."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _definitions(child)
