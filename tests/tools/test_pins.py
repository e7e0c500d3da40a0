"""The installation holds together: imports declared, pins within their bounds, resolvable from the public index."""

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import polarlm
from tools import pins


def test_every_third_party_import_is_declared():
    assert list(pins.undeclared_imports()) == []


def test_an_undeclared_import_is_found_even_inside_a_function(tmp_path):
    package = tmp_path / "somewhere"
    package.mkdir()
    (package / "module.py").write_text("import json\nimport torch\ndef f():\n    from flask import Flask\n")
    (problem,) = pins.undeclared_imports(package)
    assert "flask" in problem and "module.py" in problem


def test_every_direct_dependency_has_one_pin_within_its_bounds_on_every_platform():
    assert [*pins.unpinned(), *pins.pins_that_contradict()] == []


def test_a_pin_outside_its_bounds_is_found(tmp_path, monkeypatch):
    other = tmp_path / "constraints.txt"
    text = pins.CONSTRAINTS.read_text(encoding="utf-8")
    other.write_text(text.replace("hydra-core==1.3.8", "hydra-core==1.3.2"), encoding="utf-8")
    monkeypatch.setattr(pins, "CONSTRAINTS", other)
    problems = list(pins.pins_that_contradict())
    assert problems and all("hydra-core==1.3.2" in p for p in problems)


def test_a_missing_and_a_doubled_pin_are_found(tmp_path, monkeypatch):
    other = tmp_path / "constraints.txt"
    lines = pins.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    other.write_text("\n".join([*(x for x in lines if not x.startswith("rich==")), "torch==2.12.0"]), encoding="utf-8")
    monkeypatch.setattr(pins, "CONSTRAINTS", other)
    assert {problem.split()[0] for problem in pins.unpinned()} == {"rich", "torch"}


@pytest.mark.slow
def test_the_pins_resolve_from_the_public_index_for_the_oldest_python_and_cuda():
    if not (shutil.which("uv") or (Path(sys.executable).parent / "uv").exists()):
        pytest.skip("uv is not installed")
    try:
        urllib.request.urlopen(f"{pins.INDEX}/uv/", timeout=10).close()
    except OSError as error:
        pytest.skip(f"no public package index here: {error}")
    where = ("--python-version", "3.10", "--python-platform", "x86_64-manylinux_2_28")
    try:
        solution = pins.uv("pip", "compile", "pyproject.toml", "--extra", "dev", "-c", str(pins.CONSTRAINTS), *where)
    except subprocess.CalledProcessError as error:
        if "No solution found" not in error.stderr:
            pytest.skip(f"the index went away: {error.stderr[-300:]}")
        pytest.fail(error.stderr)
    assert "triton==" in solution and "torch==" in solution


def test_versions_that_other_files_name_are_the_same():
    root = pins.ROOT
    (ruff,) = [pins.version(pin) for pin in pins.pins()["ruff"]]
    assert f"rev: v{ruff}" in (root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert f"\nversion: {polarlm.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")


def test_the_container_gets_everything_that_the_wheel_ships():
    project = pins.tomllib.loads((pins.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    shipped = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", project["project"]["readme"]}
    lines = (pins.ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert shipped <= copied
