"""The worked examples of docs/extending.md are true: applied to a copy, found by tests, trained; few files each."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", PAGE, flags=re.MULTILINE | re.DOTALL))
# `file` (new): / `file`, before `text`: / `file`, at the end: and the code that follows
EXAMPLE = re.compile(r"^`([\w./]+)`(?: \((new)\)|, (before) `(.+?)`|, (at the end)):\n\n```\w+\n(.*?)^```", re.M | re.S)


def examples(section: str) -> list[tuple[str, str, str | None, str]]:
    """(file, new | before | at the end, text to stand before, code) of every block of a section."""
    matches = EXAMPLE.findall(SECTIONS[section])
    return [(file, new or before or end, anchor or None, code) for file, new, before, anchor, end, code in matches]


def apply(tree: Path, file: str, how: str, anchor: str | None, code: str) -> None:
    path = tree / file
    if how == "new":
        assert not path.exists(), f"{file} exists already"
        path.write_text(code, encoding="utf-8")
    elif how == "at the end":
        path.write_text(path.read_text(encoding="utf-8") + "\n\n" + code, encoding="utf-8")
    else:
        text = path.read_text(encoding="utf-8")
        assert text.count(anchor) == 1, f"{file} does not hold {anchor!r} once"
        path.write_text(text.replace(anchor, code.rstrip("\n") + "\n" + anchor), encoding="utf-8")


def test_adding_something_touches_few_files():
    touched = {section: {file for file, *_ in examples(section)} for section in SECTIONS}
    setting = touched.pop("A setting of the polar block")
    assert set(touched) == {"A block", "An optimiser", "A metric", "A diagnostic"}
    assert len(setting) == 3 and all(1 <= len(files) <= 2 for files in touched.values())
    for section in SECTIONS:
        assert SECTIONS[section].count("```") == 2 * len(examples(section))  # every block of code is applied


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the repository with all examples in it."""
    tree = tmp_path_factory.mktemp("extended") / "tree"
    tree.mkdir()
    for name in ("polarlm", "configs", "tests", "docs", "train.py", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    for section in SECTIONS:
        for example in examples(section):
            apply(tree, *example)
    return tree


def run(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_tests_of_a_copy_with_the_examples_find_and_accept_them(extended):
    # Of the contract, what a new block gets wrong most easily; all of it would be a minute more.
    contract = "difference and (past or cached or documents or float64 or record)"
    chosen = f"({contract}) or bits_per_character or (test_values and standard)"
    chosen += " or max_step or a_bound or every_switch_of_the_yaml or every_setting_of_polar"
    files = ("tests/contract/test_block_contract.py", "tests/evaluation/test_metrics.py", "tests/diagnostics")
    files += ("tests/attention/test_max_step.py", "tests/attention/test_oracle.py", "tests/fast/test_decoding.py")
    output = run(extended, "-m", "pytest", "-v", "-p", "no:xdist", "-k", chosen, *files)
    passed = [line for line in output.splitlines() if " PASSED" in line]
    assert sum("test_block_contract" in line and "[difference" in line for line in passed) >= 5
    assert any("test_bits_per_character_of_a_coin_per_character" in line for line in passed)
    assert any("test_values" in line and "standard" in line for line in passed)


@pytest.mark.slow
def test_a_run_uses_the_new_block_and_optimiser_and_writes_the_new_numbers(extended):
    text = extended / "text.txt"
    text.write_text("".join(f"{i} lamps and {i * i % 7} rivers.\n\n" for i in range(400)))
    run(
        extended, "train.py", "block=difference", "optim=sgd", "data=text", f"data.path={text}", "data.split.val=0.1",
        "tokenizer=byte", "logger=none", "model.d_model=16", "model.n_layer=1", "model.n_head=2", "model.context=16",
        "trainer.max_steps=4", "trainer.batch_tokens=64", "trainer.val_every=2", "diagnostics.every=2", "name=all-four",
    )  # fmt: skip
    folder = extended / "runs" / "all-four"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["val/bits_per_character"] == pytest.approx(summary["val/bits_per_byte"])  # the text is ASCII
    run(
        extended, "train.py", "block=polar", "block.step.max_step=0.5", "data=text", f"data.path={text}",
        "data.split.val=0.1", "tokenizer=byte", "logger=none", "model.d_model=16", "model.n_layer=1", "model.n_head=2",
        "model.context=16", "trainer.max_steps=2", "trainer.batch_tokens=64", "name=bounded",
    )  # fmt: skip
    assert json.loads((extended / "runs" / "bounded" / "summary.json").read_text())["status"] == "finished"
    assert "largest RMS" in run(extended, "-m", "polarlm", "explain", "block.step.max_step")
    assert "attention/largest_weight" in (folder / "diagnostics" / "probe.jsonl").read_text()
