"""The docs site builds without a warning, links lead somewhere, and Python on its pages runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md")
APPLIED = ("docs/extending.md",)  # its code is applied to a copy by tests/contract/test_contributing.py
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [p for p in (*OUTSIDE, *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))) if p not in APPLIED]


def nav_pages(entries) -> list[str]:
    """The files that the navigation names."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else nav_pages(value))]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    paper = (tmp_path / "site" / "paper" / "index.html").read_text(encoding="utf-8")
    assert "<math" in paper and "arithmatex" not in paper  # a formula needs no script
    assert not re.findall(
        r"<(?:script|link rel=.stylesheet.)[^>]*(?:src|href)=.https?:", paper
    )  # and the page no network
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert all(name in api for name in ("PolarAttention", "GPTConfig", "run_probe", "compare_seeds", "RTFilter"))


def test_every_page_is_in_the_navigation_and_begins_with_what_the_reader_can_do():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = nav_pages(yaml.safe_load(text)["nav"])
    assert sorted(pages) == sorted(path.name for path in ROOT.glob("docs/*.md"))
    silent = [
        page
        for page in pages
        if page != "index.md"
        and not re.search(r"\A# .+\n\nAfter (reading )?this page", (ROOT / "docs" / page).read_text())
    ]
    assert not silent, silent


def test_no_page_has_a_diagram_whose_script_comes_from_the_network():
    pages = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")]
    assert len(pages) > 20 and not any("```mermaid" in page for page in pages)


@pytest.mark.parametrize("page", OUTSIDE)
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search((ROOT / page).read_text(encoding="utf-8"))])
def test_python_on_a_page_runs_when_it_is_pasted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "pasted"}
    for code in CODE.findall((ROOT / page).read_text(encoding="utf-8")):
        exec(compile(code, page, "exec"), names)
