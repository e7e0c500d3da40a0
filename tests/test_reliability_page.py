"""docs/reliability.md: every test that a row names exists, and every row names one."""

from __future__ import annotations

import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][1:]


def functions_in(path: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def named(text: str) -> list[tuple[str, str | None]]:
    """(file, function or None) of every test in backticks; `…name` is in the file named before it."""
    mentions: list[tuple[str, str | None]] = []
    for mention in re.findall(r"`((?:tests/|…)[^`]+)`", text):
        file, _, function = mention.partition("::")
        if mention.startswith("…"):
            file, function = mentions[-1][0], mention
        mentions.append((file, function or None))
    return mentions


def test_every_row_names_a_test_that_exists():
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == 3, row
        mentions = named(row[2])
        assert mentions, row
        for file, function in mentions:
            assert (ROOT / file).exists(), file
            if function is not None:
                pattern = re.compile(re.escape(function).replace("…", ".*"))
                assert any(pattern.search(name) for name in functions_in(file)), f"{file}::{function}"


def test_tests_named_in_the_text_exist_too():
    for file, _ in named(PAGE):
        assert (ROOT / file).exists(), file
