"""docs/scaling.md lists the functions with lines that only a GPU runs: all that the code has."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tools.gpu_code import functions_of, gpu_functions

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_table_has_everything_that_names_a_gpu_and_nothing_that_is_gone():
    table = re.findall(r"^\| `(polarlm/\S+::\S+)`", PAGE, re.MULTILINE)
    assert not set(gpu_functions()) - set(table)
    for row in table:
        file, _, name = row.partition("::")
        assert re.search(rf"^ *def {name.rpartition('.')[2]}\(", (ROOT / file).read_text(), re.MULTILINE), row


def test_what_counts_as_naming_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.gpu_code.ROOT", tmp_path)
    text = 'def a():\n    "about cuda"\n    return 1\n\ndef b(x):\n    return x.is_cuda\n\n'
    text += 'class C:\n    def d(self):\n        return "cuda"\n'
    (tmp_path / "code.py").write_text(text)
    assert list(functions_of(tmp_path / "code.py")) == ["code.py::b", "code.py::C.d"]
