"""eval.py as people type it: many runs, many protocols, other corpora, and what stays in the run folder."""

import json

import numpy as np
import pytest

from polarlm.launch.evaluate import as_lists, find_checkpoints
from polarlm.runs.measurements import read_arrays, read_evaluations


def test_several_values_are_a_list_and_a_sweep_stays_a_sweep():
    assert as_lists(["checkpoint=a,b", "split=val"]) == ["checkpoint=['a','b']", "split=val"]
    assert as_lists(["checkpoint=runs/x=1"]) == ["checkpoint=['runs/x=1']"]
    assert as_lists(["protocol=[length]", "rates=0.1,0.2"]) == ["protocol=[length]", "rates=['0.1','0.2']"]
    assert as_lists(["-m", "checkpoint=a,b"]) == ["-m", "checkpoint=a,b"]


def test_every_name_has_its_protocol():
    from polarlm.launch import protocols
    from polarlm.launch.evaluate import PROTOCOL_NAMES

    functions = [name.removeprefix("run_") for name in vars(protocols) if name.startswith("run_")]
    assert sorted(functions) == sorted([*PROTOCOL_NAMES, "downstream"])


def test_a_folder_of_runs_stands_for_its_finished_runs(tmp_path):
    for name in ("a", "b", "unfinished"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints" / "model.safetensors").touch()
    assert find_checkpoints([str(tmp_path)]) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert find_checkpoints([str(tmp_path / "a")]) == [str(tmp_path / "a")]


@pytest.mark.slow
def test_all_protocols_of_all_runs_in_one_command(workshop):
    workshop.train("name=other", "block=polar", "seed=2", "trainer.max_steps=6")
    done = workshop.run(
        "eval.py", "checkpoint=runs", "protocol=all", "lengths=1,2", "rates=0,0.3", "out=all.json", "cache_dir=cache"
    )
    assert done.code == 0, done.out
    records = json.loads((workshop.folder / "all.json").read_text())
    assert len(records) == 2 * 11
    for name in ("done", "other"):
        folder = workshop.folder / "runs" / name
        kept = {record["protocol"]["name"]: record for record in read_evaluations(folder)}
        assert len(kept) == 11
        # What training found, eval finds again to the last bit; the other protocols agree where they must.
        summary = workshop.summary(name)
        for metric, value in kept["windows"]["metrics"].items():
            assert summary[f"val/{metric}"] == value
        loss = summary["val/loss"]
        assert kept["documents"]["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert kept["length"]["by_length"]["metrics"][0]["loss"] == pytest.approx(loss, rel=1e-6)
        assert kept["corruption"]["by_corruption"]["random"]["loss"][0] == pytest.approx(loss, rel=1e-6)
        position = kept["position"]["by_position"]
        assert np.average(position["loss"], weights=position["targets"]) == pytest.approx(loss, rel=1e-6)
        assert kept["sliding"]["protocol"]["stride"] == 16
        arrays = read_arrays(folder, kept["documents"])
        assert arrays["nats"].sum() / arrays["targets"].sum() == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_another_corpus_is_cut_by_the_runs_own_tokenizer(workshop):
    other = workshop.folder / "other.txt"
    other.write_text("Quite another text, with other words in it.\n" * 200)
    done = workshop.run(
        "eval.py", "checkpoint=runs/done", "data=text", f"data.path={other}", "data.split.val=0.5", "cache_dir=cache",
        "out=other.json",
    )  # fmt: skip
    assert done.code == 0, done.out
    result = json.loads((workshop.folder / "other.json").read_text())
    assert result["protocol"]["data"] == "text" and result["protocol"]["tokens"] == pytest.approx(4400, abs=100)
    assert result["val/loss"] > workshop.summary("done")["val/loss"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoint=nowhere"], "nowhere does not exist"),
        (["checkpoint=runs/done", "protocol=slidng"], "Did you mean sliding"),
        (["checkpoint=runs/done", "split=test"], "split=test does not exist"),
        (["checkpoint=runs/done", "protocol=sliding", "stride=33"], "stride=33"),
        ([], "checkpoint must be given"),
    ],
)
def test_a_wrong_question_is_answered_in_one_sentence(workshop, arguments, said):
    done = workshop.run("eval.py", *arguments, "cache_dir=cache")
    assert done.code == 2 and said in done.out and "Traceback" not in done.out, done.out
