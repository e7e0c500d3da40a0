"""Nothing in the repository cites a file that is not in it."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = "py|md|yaml|yml|toml|png|ipynb|js|css|html|cff|cpp"
# A path with a folder in it, or the name of a page; a placeholder (<name>, *, {…}, $X, …) beside it makes it a pattern.
PATH = re.compile(
    rf"(?<![\w./<>*{{}}$~:@…-])((?:\.\./)*(?:[\w.-]+/)+[\w-][\w.-]*\.(?:{KINDS})|[\w-]+\.md)(?![\w/*<{{…-])"
)
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
# Written by a user or by a run, not part of the repository.
MADE_LATER = (
    "data/raw/",
    "data/cache/",
    "runs/",
    "configs/block/mine.yaml",
    "configs/callbacks/mine.yaml",
    "gpu-report.md",
)


def repository_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


FILES = repository_files()


def prose(file: Path) -> str:
    """What a file says to people: all of a page or a yaml, comments and docstrings of a program."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, documented)]
    return "\n".join(comments + docstrings)


def cited(file: Path) -> Iterator[str]:
    text = re.sub(r"^`[^`]+` \(new\):$", "", prose(file), flags=re.MULTILINE)  # files that an example makes
    yield from PATH.findall(text)
    if file.suffix == ".md":
        yield from (link for link in LINK.findall(text) if "://" not in link)


def exists(name: str, file: Path) -> bool:
    # Pages shorten paths: a test below tests/, a module below polarlm/, another page of the same folder.
    places = (ROOT, file.parent, ROOT / "polarlm", ROOT / "tests", ROOT / "docs", ROOT / "configs")
    return any((place / name).exists() and (place / name).resolve().is_relative_to(ROOT) for place in places)


@pytest.mark.parametrize("kind", ["md", "py", "yaml", "yml", "toml", "cff"])
def test_every_file_that_is_cited_exists(kind):
    files = [file for file in FILES if file.suffix == f".{kind}"]
    assert files
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in cited(file)
        if not name.startswith(MADE_LATER) and not exists(name, file)
    }
    assert not missing


def test_a_citation_of_an_absent_file_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("notes.md, ../shared/notes/other.py, polarlm/nowhere.py and [this](gone.png); not configs/*.yaml.")
    names = list(cited(page))
    assert names == ["notes.md", "../shared/notes/other.py", "polarlm/nowhere.py", "gone.png"]
    assert not any(exists(name, ROOT / "docs" / "page.md") for name in names)
