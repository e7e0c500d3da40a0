"""A name says what it is, and no two things of the package share one."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = {
    "add_parser": "every verb of the command line has one",
    "main": "what `python -m` calls",
    "tangent_step": "of one direction (geometry/likelihood.py), and of a layer's heads (geometry/multihead.py)",
}
SAY_NOTHING = {"found", "told"}


def test_no_two_public_things_of_the_package_have_one_name():
    places = defaultdict(list)
    for path in sorted((ROOT / "polarlm").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice.keys() <= SHARED.keys(), {name: files for name, files in twice.items() if name not in SHARED}
    assert SHARED.keys() <= twice.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize("folder", ["polarlm", "tests", "tools", "benchmarks"])
def test_names_say_what_they_hold(folder):
    empty = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in [getattr(node, "id", None) or getattr(node, "arg", None)]
        if name in SAY_NOTHING
    ]
    assert not empty, "\n".join(empty)
