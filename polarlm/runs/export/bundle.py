"""The source of a model in one file: what polarlm's modules define, in the order of their dependencies.

transformers copies modeling_*.py beside the weights and refuses a file that imports a package which is not installed.
So every definition of polarlm that the model reaches is written into one file, without imports from polarlm. Names that
two modules define get the module's name appended. polarlm/fast, which needs compilers and Triton, is reached by none.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Module:
    """A module's source, and where its names come from."""

    name: str
    text: str
    tree: ast.Module
    defined: set[str] = field(default_factory=set)  # at the top level
    taken: dict[str, tuple[str, str]] = field(default_factory=dict)  # name here → (module, name there)
    outside: dict[str, None] = field(default_factory=dict)  # import statements of other packages

    @property
    def needed(self) -> list[str]:
        """The polarlm modules that it imports from."""
        return list(dict.fromkeys(home for home, _ in self.taken.values()))


def bundle(entry: str, source: str) -> str:
    """One file with a module given as text and every polarlm module that it needs."""
    modules: dict[str, Module] = {}
    order = list(_in_order(entry, source, modules, set()))
    kept = _reached(modules, entry)
    for module in order:
        module.tree.body = [node for node in module.tree.body if node in kept[module.name] or _is_import(node)]
    order = [module for module in order if kept[module.name]]
    final = _final_names(order)
    parts = [_written(module, final, kept[module.name]) for module in order]
    code = "\n".join(parts)
    outside = sorted({line for module in order for line in module.outside if _is_used(line, code)})
    head = ["from __future__ import annotations", "", *outside]
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _in_order(name: str, text: str, modules: dict[str, Module], begun: set[str]) -> Iterator[Module]:
    """What a module needs, then itself; of a circle, the first that was met comes last."""
    begun.add(name)
    modules[name] = module = _read(name, text)
    for other in module.needed:
        if other not in begun:
            yield from _in_order(other, _source(other), modules, begun)
    yield module


def _reached(modules: dict[str, Module], entry: str) -> dict[str, set[ast.stmt]]:
    """The statements of every module that the entry needs, directly or through others."""
    kept: dict[str, set[ast.stmt]] = {name: set() for name in modules}
    waiting = [(entry, node) for node in modules[entry].tree.body if not _is_import(node)]
    while waiting:
        name, node = waiting.pop()
        if node in kept[name]:
            continue
        kept[name].add(node)
        module = modules[name]
        for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            home, there = module.taken.get(used, (name, used))
            if home in modules:
                waiting += [(home, other) for other in modules[home].tree.body if there in _defines(other)]
        # What a module does when it is imported (register, fill a table) it does for those who use anything of it.
        waiting += [(name, other) for other in module.tree.body if _acts(other)]
    return kept


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _acts(node: ast.stmt) -> bool:
    """A statement that is neither a definition nor an import nor a docstring."""
    defines = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)) or _is_import(node)
    return not defines and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.For, ast.With, ast.Try)):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


def _is_used(line: str, code: str) -> bool:
    node = ast.parse(line).body[0]
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return any(re.search(rf"\b{name}\b", code) for name in names)


def _read(name: str, text: str) -> Module:
    module = Module(name, text, ast.parse(text))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] == "polarlm" for alias in node.names):
                raise ValueError(f"{name} imports polarlm as a whole; an export needs `from … import …`")
            if node in module.tree.body:
                module.outside[ast.unparse(node)] = None
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(name, node)
            if origin.split(".")[0] == "polarlm":
                for alias in node.names:
                    module.taken[alias.asname or alias.name] = (_home(origin, alias.name), alias.name)
            elif origin != "__future__" and node in module.tree.body:
                module.outside[ast.unparse(node)] = None
    module.defined = {defined for node in module.tree.body for defined in _defines(node)}
    return module


def _final_names(order: list[Module]) -> dict[tuple[str, str], str]:
    """(module, name) → the name in the one file; the last module that defines a name keeps it."""
    owners: dict[str, str] = {}
    for module in order:
        owners |= dict.fromkeys(module.defined, module.name)
    imported = {alias.asname or alias.name.split(".")[0] for m in order for alias in _outside_aliases(m)}
    final = {}
    for module in order:
        for name in module.defined:
            kept = owners[name] == module.name and name not in imported
            final[module.name, name] = name if kept else f"{name}__{module.name.rpartition('.')[2]}"
    return final


def _outside_aliases(module: Module) -> Iterator[ast.alias]:
    for line in module.outside:
        node = ast.parse(line).body[0]
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        yield from node.names


def _written(module: Module, final: dict[tuple[str, str], str], kept: set[ast.stmt]) -> str:
    """The statements that are kept, with their names replaced and their comments; imports of polarlm are taken out."""
    renamed = {name: final[module.name, name] for name in module.defined}
    renamed |= {name: final.get((home, there), there) for name, (home, there) in module.taken.items()}
    lines = [line.encode() for line in module.text.splitlines()]
    spans = [_span(node, lines) for node in module.tree.body if node in kept]
    edits = [*_replacements(module.tree, renamed), *_definitions(module, renamed), *_removals(module)]
    for first, start, last, end, new in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        lines[first : last + 1] = (lines[first][:start] + new.encode() + lines[last][end:]).split(b"\n")
        moved = len((lines[first][:start] + new.encode()).split(b"\n")) - 1 - (last - first)
        assert moved <= 0
        lines[first + 1 : first + 1] = [b""] * -moved  # line numbers stay what they were
    statements = [b"\n".join(lines[first:last]).decode().rstrip() for first, last in spans]
    text = _joined(statements)
    title = f"# ── {module.name} " + "─" * max(3, 110 - len(module.name))
    return f"{title}\n\n{text}"


def _span(node: ast.stmt, lines: list[bytes]) -> tuple[int, int]:
    """First and last line of a statement with its decorators and the comments directly above it."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith(b"#"):
        first -= 1
    return first, node.end_lineno or node.lineno


def _joined(statements: list[str]) -> str:
    """Statements with two empty lines around functions and classes."""
    text = ""
    for statement in statements:
        large = "\n" in statement or statement.startswith(("def ", "class ", "@"))
        text += ("\n\n\n" if large or text.endswith("\n") else "\n") * bool(text) + statement
    return text


Edit = tuple[int, int, int, int, str]  # first line, its column, last line, its column, what stands there instead


def _replacements(tree: ast.AST, renamed: dict[str, str]) -> Iterator[Edit]:
    """Every use of a renamed name; inside a function whose argument has that name it means the argument."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = tree.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        inner = {name: new for name, new in renamed.items() if name not in {a.arg for a in every if a is not None}}
        outer = [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
        outer += [a.annotation for a in every if a is not None and a.annotation is not None]
        outer += (
            [] if isinstance(tree, ast.Lambda) else [*tree.decorator_list, *([tree.returns] if tree.returns else [])]
        )
        for part in outer:
            yield from _replacements(part, renamed)
        for statement in [tree.body] if isinstance(tree, ast.Lambda) else tree.body:
            yield from _replacements(statement, inner)
        return
    if isinstance(tree, ast.ClassDef):
        own = {n.id for part in tree.body for n in _at_class_level(part) if isinstance(n.ctx, ast.Store)}
        fields = {name: new for name, new in renamed.items() if name not in own}
        for node in (*tree.bases, *tree.keywords, *tree.decorator_list):
            yield from _replacements(node, renamed)
        for node in tree.body:
            yield from _replacements(node, renamed if isinstance(node, ast.FunctionDef) else fields)
        return
    if isinstance(tree, ast.Name) and renamed.get(tree.id, tree.id) != tree.id:
        yield tree.lineno - 1, tree.col_offset, tree.lineno - 1, tree.end_col_offset or 0, renamed[tree.id]
    for node in ast.iter_child_nodes(tree):
        yield from _replacements(node, renamed)


def _at_class_level(part: ast.stmt) -> Iterator[ast.Name]:
    if not isinstance(part, (ast.FunctionDef, ast.ClassDef)):
        yield from (node for node in ast.walk(part) if isinstance(node, ast.Name))


def _definitions(module: Module, renamed: dict[str, str]) -> Iterator[Edit]:
    """The names of renamed functions and classes where they are defined."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and renamed[node.name] != node.name:
            start = len("def " if isinstance(node, ast.FunctionDef) else "class ")
            yield node.lineno - 1, start, node.lineno - 1, start + len(node.name.encode()), renamed[node.name]


def _removals(module: Module) -> Iterator[Edit]:
    """Imports that stand at the top of the file, or that the one file does not need."""
    for parent in ast.walk(module.tree):
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            top = node in module.tree.body
            ours = isinstance(node, ast.ImportFrom) and _origin(module.name, node).split(".")[0] == "polarlm"
            if ours or top:
                last, end = (node.end_lineno or 0) - 1, node.end_col_offset or 0
                yield node.lineno - 1, node.col_offset, last, end, "" if top else "pass"


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
