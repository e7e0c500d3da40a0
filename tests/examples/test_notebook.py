"""The example notebook runs from the first cell to the last, and shows that its models learn."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "polar_in_a_notebook.ipynb"


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
