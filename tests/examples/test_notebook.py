"""The example notebooks run from the first cell to the last, and show what they promise."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from study.pictures import overview_bars
from study.results import read_answers

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "polar_in_a_notebook.ipynb"


@pytest.mark.slow
def test_the_example_notebook_runs_and_both_models_learn(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))  # the kernel is another process
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import json; print(json.dumps(curves))"))
    NotebookClient(notebook, timeout=550, resources={"metadata": {"path": str(tmp_path)}}).execute()
    curves = json.loads(notebook.cells[-1].outputs[0]["text"])
    assert len(curves) == 2
    for name, losses in curves.items():
        assert losses[-1] < 0.6 * losses[0], name


def test_the_badge_and_the_install_cell_name_the_repository_of_the_docs():
    (address,) = re.findall(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    text = NOTEBOOK.read_text(encoding="utf-8")
    page = f"{address.replace('https://github.com', 'github')}/blob/main/examples/{NOTEBOOK.name}"
    assert f"https://colab.research.google.com/{page}" in text and f"%pip install --quiet git+{address}" in text
    assert f"https://colab.research.google.com/{page}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_results_notebook_redraws_the_overview_from_the_rows():
    notebook = nbformat.read(ROOT / "examples" / "results.ipynb", as_version=4)
    check = "import json; print(json.dumps([[bar.label, bar.mean, bar.low, bar.high] for bar in bars]))"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    NotebookClient(notebook, timeout=550, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    drawn = json.loads(notebook.cells[-1].outputs[0]["text"])
    expected = overview_bars(read_answers(ROOT / "docs" / "study"))
    assert drawn == [[bar.label, bar.mean, bar.low, bar.high] for bar in expected]
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
