"""The list of small bugs fits the code, and the tool tells a bug that is noticed from one that is not."""

import json
import subprocess
from pathlib import Path

import pytest

from tools.mutants import run
from tools.mutants.catalogue import ALL
from tools.mutants.mutant import Mutant, Stale

ROOT = Path(__file__).resolve().parents[2]


def is_stale(mutant: Mutant) -> bool:
    try:
        mutant.applied(ROOT)
    except Stale:
        return True
    return not all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_the_list_is_long_unique_and_fits_the_code():
    assert len({m.name for m in ALL}) == len(ALL) >= 100
    # Code moves on; a few entries may lag behind until `make mutants` is run again, which refuses any.
    stale = [f"{m.name}: {m.bug}" for m in ALL if is_stale(m)]
    assert len(stale) <= len(ALL) // 20, stale


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A repository with one function and a test that looks at half of it."""
    (tmp_path / "arithmetic.py").write_text("def both(a, b):\n    return a + b, a * b\n")
    (tmp_path / "test_arithmetic.py").write_text(
        "from arithmetic import both\ndef test_sum():\n    assert both(2, 3)[0] == 5\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "build")
    return tmp_path


def bugs(*changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant("arithmetic.py", old, new, ("test_arithmetic.py",), "a bug") for old, new in changes]


def test_a_noticed_bug_is_killed_and_an_unnoticed_one_survives(project, monkeypatch, capfd):
    monkeypatch.setattr(run, "ALL", bugs(("a + b", "a - b"), ("a * b", "a / b")))
    before = (project / "arithmetic.py").read_text()
    assert run.main([]) == 1  # half of them is not enough
    assert "1 of 2 small bugs noticed (50.0%)" in capfd.readouterr().out
    rows = [json.loads(line) for line in (project / "build" / "results.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["killed", "survived"]
    assert rows[0]["by"].endswith("::test_sum")
    assert (project / "arithmetic.py").read_text() == before
    assert run.main([]) == 1 and len((project / "build" / "results.jsonl").read_text().splitlines()) == 2  # remembered
    (project / "test_arithmetic.py").write_text(
        "from arithmetic import both\ndef test():\n    assert both(2, 3) == (5, 6)\n"
    )
    assert run.main([]) == 0


def test_a_bug_that_no_longer_fits_and_a_test_that_fails_by_itself_are_told(project, monkeypatch, capfd):
    monkeypatch.setattr(run, "ALL", bugs(("a ** b", "a"), ("a * b", "a / b")))
    (project / "test_arithmetic.py").write_text("def test():\n    assert False\n")
    assert run.main([]) == 1
    output = capfd.readouterr()
    assert "stale" in output.out and "fails by itself: test_arithmetic.py" in output.out


def test_a_bug_whose_tests_do_not_exist_is_not_killed(project, monkeypatch, capfd):
    monkeypatch.setattr(
        run, "ALL", [Mutant("arithmetic.py", "a * b", "a / b", ("test_arithmetic.py::test_gone",), "a bug")]
    )
    assert run.main(["--trust"]) == 1
    assert "no tests: arithmetic-" in capfd.readouterr().out
