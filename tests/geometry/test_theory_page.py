"""docs/theory.md may only name functions and tests that exist, and must cover the paper's numbered statements."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
# The families of identities: transport, kernel, causality, geometry, heads, radial, extensions, model.
IDENTITIES = {"T": 6, "K": 13, "C": 2, "G": 12, "H": 6, "R": 3, "X": 4, "U": 3, "M": 3}
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
CODE = sorted(set(re.findall(r"`([\w/]+\.py):(\w+(?:\.\w+)?)`", PAGE)))


@cache
def definitions(path: Path) -> set[str]:
    """Names defined or imported at the top level of a file, and Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_every_named_test_exists():
    assert len(TESTS) > 60
    assert [pair for pair in TESTS if pair[1] not in definitions(ROOT / "tests" / pair[0])] == []


def test_every_named_function_exists():
    assert len(CODE) > 60
    assert [pair for pair in CODE if pair[1] not in definitions(ROOT / "polarlm" / pair[0])] == []


def test_every_row_names_code_and_a_test():
    rows = [line for line in PAGE.split("## Every identity")[0].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| paper", "| C.1", "| block", "| `rfa"))]
    assert len(rows) > 50
    for row in rows:
        assert re.search(r"\.py:\w", row) and "::test_" in row, row


def test_every_numbered_statement_appears():
    for number in range(1, 16):
        spans = [tuple(map(int, m.groups())) for m in re.finditer(r"Eq\. (\d+)–(\d+)", PAGE)]
        assert re.search(rf"Eq\. {number}\b", PAGE) or any(a <= number <= b for a, b in spans), f"Eq. {number}"
    for statement in ("Prop. 1", "Prop. 2", "Prop. 3", "Prop. 4", "Prop. 5", "Corollary", "Lemma"):
        assert statement in PAGE
    for step in range(1, 8):
        assert f"step {step}," in PAGE
    sections = re.findall(r"^##+ (3\.\d|Appendix [A-G])", PAGE, flags=re.MULTILINE)
    assert sections == [f"3.{n}" for n in range(1, 7)] + [
        f"Appendix {letter}" for letter in "ABCDEFG"
    ]  # the paper's order


def test_the_page_says_which_block_is_which_rfa():
    rows = dict(re.findall(r"^\| `(rfa\w*)` \| (.+) \|$", PAGE, flags=re.MULTILINE))
    assert rows.keys() == {path.stem for path in (ROOT / "configs" / "block").glob("rfa*.yaml")}
    for name in ("rfa_published", "rfa_sc"):
        damping = yaml.safe_load((ROOT / "configs" / "block" / f"{name}.yaml").read_text())["damping"]
        stated = [float(x) for x in re.search(r"fixed: ([\d.]+)(?: · (\d+)/(\d+))? of", rows[name]).groups("1")]
        assert stated[0] * stated[1] / stated[2] == pytest.approx(damping, rel=1e-3)


def test_every_identity_has_a_row_with_a_test():
    table = PAGE.split("## Every identity")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", table, flags=re.MULTILINE))
    assert list(rows) == [f"{letter}{n}" for letter, last in IDENTITIES.items() for n in range(1, last + 1)]
    assert all("::test_" in row for row in rows.values())


def test_the_errata_are_complete_and_what_the_code_refers_to_exists():
    table = PAGE.split("## Errata")[1].split("### Found")[0]
    ids = re.findall(r"^\| ([EN]\d+) \|", table, flags=re.MULTILINE)
    assert ids == [f"E{n}" for n in range(1, 44)] + [f"N{n}" for n in range(1, 11)]
    for file in (ROOT / "polarlm").rglob("*.py"):
        named = re.findall(r"theory\.md,? ([EN]\d+)", file.read_text(encoding="utf-8"))
        assert set(named) <= set(ids), file


def test_every_geometry_test_file_is_used():
    named = {path for path, _ in TESTS}
    files = {f"geometry/{path.name}" for path in (ROOT / "tests" / "geometry").glob("test_*.py")}
    assert files - named == {"geometry/test_theory_page.py"}
