"""Which code made a run."""

import shutil
import subprocess

import pytest

from polarlm.runs.folder import code_version

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments):
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    package = tmp_path / "polarlm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "rows.json").write_text("[]")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@needs_git
def test_rows_written_beside_the_code_do_not_change_it_and_new_code_does(repository):
    package = repository / "polarlm"
    commit, dirty = code_version(package)
    assert len(commit) == 40 and dirty is False
    (repository / "rows.json").write_text("[1]")
    (repository / "notes.txt").write_text("nobody's code")
    assert code_version(package) == (commit, False)
    (package / "block.py").write_text("")
    assert code_version(package) == (commit, True)


@needs_git
def test_an_installed_package_does_not_take_the_commit_of_the_repository_around_it(repository):
    (repository / ".gitignore").write_text(".venv\n")
    installed = repository / ".venv" / "polarlm"
    shutil.copytree(repository / "polarlm", installed)
    assert code_version(installed) == (None, None)


def test_without_git_the_version_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(tmp_path) == (None, None)
