"""A run folder from a stranger: refused in one sentence, nothing executed, nothing resolved, nothing endless."""

import io
import json
import os
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from polarlm.cli import main
from polarlm.data import expansion
from polarlm.errors import UserError
from polarlm.model.build import build_model
from polarlm.runs.evaluations import read_arrays, read_evaluations, write_evaluation
from polarlm.runs.files import printable, read_config, read_json
from polarlm.runs.lock import lock_folder
from polarlm.runs.opening import _remove_unfinished_files
from polarlm.runs.reading import read_run
from polarlm.runs.restore import restore_run
from polarlm.runs.settings_of import is_choice
from polarlm.runs.sweeps import known_runs
from polarlm.verdict.per_document import _losses
from tests.runs.made_up_run import made_up_run

MODEL = dict(context=16, d_model=16, n_layer=1, n_head=2)
STANDARD = {"_target_": "polarlm.attention.StandardAttention", "_partial_": True}


@pytest.mark.parametrize(
    "block",
    [
        {**STANDARD, "qk_norm": {"_target_": "sympy.sympify", "a": "__import__('os').system('touch executed')"}},
        {"_target_": "torch.utils.collect_env.run", "command": "touch executed"},
        {"_target_": "os.system", "_args_": ["touch executed"]},
        {"_target_": "polarlm.data.atomic.write_beside", "target": "executed", "content": "x"},
        {**STANDARD, "_args_": [1]},
        {**STANDARD, "qk_norm": [{"_target_": "os.system"}]},
        {**STANDARD, "_target_": ["os.system"]},
        "os.system",
        None,
    ],
)
def test_a_stored_configuration_builds_only_our_own_classes_with_plain_values(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="block"):
        build_model({"model": MODEL, "block": block}, 32)
    assert not (tmp_path / "executed").exists()


def test_nothing_is_interpolated(monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        build_model({"model": {**MODEL, "ffn": "${oc.env:SECRET}"}, "block": STANDARD}, 32)
    assert "hunter2" not in str(caught.value)


@pytest.mark.timeout(60)  # unfolded it would take days
def test_an_alias_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="aliases"):
        read_config(path)
    run = read_run(tmp_path)
    assert run.config == {} and "aliases" in run.problems[0]
    path.write_text("trainer: {}\n" + path.read_text())
    assert known_runs(tmp_path.parent) == {}  # a sweep that looks for finished runs


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "x" * (2 << 20), "!!python/object/apply:os.system ['true']"])
def test_a_damaged_configuration_gives_one_sentence(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml can't be read"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["", "{", '{"a": nope}', "[" * 100_000, "[1]", "3", "null", '"finished"', "9" * 6000])
def test_a_damaged_summary_gives_one_sentence(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        read_json(tmp_path / "summary.json")


def test_a_folder_in_the_place_of_a_file_gives_one_sentence(tmp_path):
    for name, read in (("summary.json", read_json), ("config.yaml", read_config)):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN", "true", '"x"', "[1]", "{}"])
def test_numbers_that_are_none_are_left_out(tmp_path, number):
    (tmp_path / "config.yaml").write_text("seed: 3")
    (tmp_path / "summary.json").write_text(f'{{"seed": {number}, "val/loss": {number}, "status": {number}}}')
    rows = f'{{"step": {number}, "train/loss": {number}}}\n{{"step": 2, "train/loss": 1.5}}\n'
    (tmp_path / "metrics.jsonl").write_text(rows + "[" * 100_000)
    (tmp_path / "diagnostics").mkdir()
    probe = f'{{"step": {number}, "tokens": {number}, "layers": {number}, "values": {{"a": {number}}}}}\n'
    (tmp_path / "diagnostics" / "probe.jsonl").write_text(probe + "[" * 100_000 + "\n" + "[" * 100_000)
    run = read_run(tmp_path)
    assert isinstance(run.seed, int) and abs(run.seed) <= 1
    assert run.number("val/loss") is None and run.metrics.stream("train/loss")["train/loss"][-1] == 1.5


def test_a_record_that_is_none_is_left_out(tmp_path):
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "a.json").write_text('{"protocol": "windows"}')
    assert read_evaluations(tmp_path) == read_evaluations(tmp_path, "windows") == []
    (tmp_path / "evaluations" / "b.json").write_text("[1]")
    with pytest.raises(UserError, match=r"b\.json is damaged"):
        read_evaluations(tmp_path)


def test_names_can_not_steer_a_terminal(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"choices": {"block": "a\x1b[2Jb"}}))
    (tmp_path / "summary.json").write_text(json.dumps({"name": "x\x1b]0;owned\x07\ny", "status": "finished"}))
    run = read_run(tmp_path)
    assert run.name.isprintable() and run.block.isprintable()
    assert printable("polar κ 1") == "polar κ 1"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A run folder to be changed; `change(config)` writes it with another configuration."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    own = made_up_run(folder).config

    def change(**groups):
        given = {**own, **groups}
        text = yaml.safe_dump({key: value for key, value in given.items() if value is not None})
        (folder / "config.yaml").write_text(text)
        return folder

    change.own, change.folder = own, folder
    return change


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("model", {"d_model": 10**5}), ("model", {"n_layer": 4000}), ("model", {"n_layer": 10**9}),
        ("model", {"context": 10**12}), ("model", {"n_head": "2"}), ("model", {"d_model": [32]}),
        ("model", [1]), ("model", None), ("block", None), ("data", None), ("choices", [1]), ("trainer", "x"),
    ],
)  # fmt: skip
def test_a_size_that_was_made_up_costs_no_memory_and_a_missing_part_is_named(stranger, group, changes):
    value = {**stranger.own[group], **changes} if isinstance(changes, dict) else changes
    with pytest.raises(UserError, match=group):
        restore_run(stranger(**{group: value}))


def test_a_terminal_is_not_steered_by_what_is_inspected_or_refused(stranger, capsys):
    folder = stranger(seed="\x1b[2J", tokenizer={"kind": "\x1b[2J"})
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(stranger(block={**stranger.own["block"], "\x1b[2J": 1}))]) == 2
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err and "\\x1b[2J" in output.out and "\\x1b[2J" in output.err


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in the file system")
@pytest.mark.timeout(60)  # a pipe that nobody writes to is read for ever
@pytest.mark.parametrize(
    "name", ["summary.json", "metrics.jsonl", "config.yaml", "corpus.json", "tokenizer/x", "checkpoints/last.ckpt"]
)
def test_a_pipe_or_device_in_a_run_folder_is_not_read(tmp_path, name):
    for place in ("diagnostics", "tokenizer", "checkpoints"):
        (tmp_path / "run" / place).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("trainer: {}")
    path = tmp_path / "run" / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make()
        for read in (read_run, restore_run):
            with pytest.raises(UserError, match="pipe or a device"):
                read(tmp_path / "run")
        assert known_runs(tmp_path) == {}


def test_the_name_of_a_corpus_or_choice_does_not_lead_elsewhere(tmp_path):
    protocol = {"name": "windows", "data": "x/../../../out", "split": "val"}
    path = write_evaluation(tmp_path / "run", {"protocol": protocol})
    assert path.parent == tmp_path / "run" / "evaluations" and list(tmp_path.iterdir()) == [tmp_path / "run"]
    with pytest.raises(FileNotFoundError, match="evaluations"):
        read_arrays(tmp_path / "run", {"arrays": "../../other.npz"})
    assert is_choice("block", "polar") and not is_choice("block", "../block/polar")


def _npz(path, shape, content):
    """An .npz of one array whose header claims a shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("nats.npy", header.getvalue() + content)


def test_arrays_that_expand_without_end_are_refused(tmp_path, monkeypatch):
    record = {"protocol": {"name": "documents", "data": "text", "split": "val"}}
    write_evaluation(tmp_path, record, {"nats": np.zeros(1 << 18), "bytes": np.ones(1 << 18)})
    (record,) = read_evaluations(tmp_path)
    path = tmp_path / "evaluations" / record["arrays"]
    assert len(read_arrays(tmp_path, record)["nats"]) == 1 << 18  # 4 MB in a few kilobytes
    monkeypatch.setattr(expansion, "ALWAYS_ALLOWED", 1 << 20)
    with pytest.raises(UserError, match=rf"{path.name} has .* MB and expands to at least 4\.2 MB.*judge the run again"):
        read_arrays(tmp_path, record)
    with pytest.raises(UserError, match=path.name):  # also told by compare, where damaged records say nothing
        _losses(SimpleNamespace(folder=tmp_path))
    _npz(path, (10**13,), bytes(100))
    with pytest.raises(UserError, match=rf"{path.name} is damaged.*allocate"):
        read_arrays(tmp_path, record)
    path.write_bytes(b"PK\3\4 but nothing else")
    with pytest.raises(UserError, match=rf"{path.name} is damaged.*judge the run again"):
        read_arrays(tmp_path, record)


def test_unfinished_files_are_not_removed_through_a_link(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tmp").write_text("mine")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / ".last.ckpt.tmp").write_text("half")
    (tmp_path / "run" / "diagnostics").symlink_to(tmp_path / "theirs")
    _remove_unfinished_files(tmp_path / "run")
    assert (tmp_path / "theirs" / "thesis.tmp").exists()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_lock_that_is_a_link_does_not_empty_the_file_behind_it(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="link to another file"):
        lock_folder(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_lock_that_is_a_folder_is_one_sentence_and_a_damaged_one_is_free(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(UserError, match=r"run\.lock is a folder"):
        lock_folder(tmp_path)
    (tmp_path / "run.lock").rmdir()
    for text in ("[" * 100_000, "9" * 6000, "[1]", "\0"):
        (tmp_path / "run.lock").write_text(text)
        lock_folder(tmp_path).release()
