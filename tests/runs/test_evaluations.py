"""Answers are kept with their questions."""

import numpy as np

from polarlm.runs.measurements import read_arrays, read_evaluations, write_evaluation

PROTOCOL = {"name": "documents", "data": "text", "split": "val", "context": 16}


def test_a_record_and_its_arrays_come_back(tmp_path):
    arrays = {"nats": np.arange(3.0), "targets": np.array([1, 2, 3], np.int32)}
    path = write_evaluation(tmp_path, {"protocol": PROTOCOL, "metrics": {"loss": 1.0}}, arrays)
    assert path.parent == tmp_path / "evaluations"
    (record,) = read_evaluations(tmp_path)
    assert record["metrics"] == {"loss": 1.0}
    again = read_arrays(tmp_path, record)
    assert again["nats"].tolist() == [0, 1, 2] and again["targets"].dtype == np.int32
    assert sorted(p.name for p in path.parent.iterdir()) == [path.stem + ".json", path.stem + ".npz"]


def test_the_same_question_replaces_its_answer_and_another_stands_beside_it(tmp_path):
    for loss in (1.0, 2.0):
        write_evaluation(tmp_path, {"protocol": PROTOCOL, "metrics": {"loss": loss}})
    write_evaluation(tmp_path, {"protocol": {**PROTOCOL, "name": "windows"}, "metrics": {"loss": 3.0}})
    assert len(read_evaluations(tmp_path)) == 2
    (record,) = read_evaluations(tmp_path, "documents")
    assert record["metrics"] == {"loss": 2.0} and read_arrays(tmp_path, record) == {}
    assert read_evaluations(tmp_path / "nothing") == []
