"""A run folder from a stranger: refused in one sentence, nothing executed, nothing resolved, nothing endless."""

import io
import json
import os
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from polarlm.block_keys import flat_block
from polarlm.cli import main
from polarlm.data import atomic, build_corpus
from polarlm.errors import UserError
from polarlm.launch.inspect import default_settings, describe_run
from polarlm.launch.protocols import corpus_for, foreign_places
from polarlm.locations import shipped_settings
from polarlm.model.build import build_model
from polarlm.printing import VisibleOutput
from polarlm.runs.files import printable, read_config, read_json
from polarlm.runs.folder import _remove_unfinished_files
from polarlm.runs.identity import known_runs
from polarlm.runs.lock import lock_folder
from polarlm.runs.measurements import read_arrays, read_evaluations, write_evaluation
from polarlm.runs.reading import read_run
from polarlm.runs.restore import require_shapes, restore_run
from polarlm.verdict.per_document import _losses
from tests.runs.made_up_run import block_settings, made_up_run

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


@pytest.mark.parametrize("target", ["hydra.utils.instantiate", "torch.utils.collect_env.run", "os.system"])
def test_a_yaml_beside_a_stored_run_does_not_permit_what_the_run_names(stranger, target, tmp_path, monkeypatch, capsys):
    (tmp_path / "configs" / "block").mkdir(parents=True)
    (tmp_path / "configs" / "block" / "note.yaml").write_text(f"_target_: {target}\n")
    monkeypatch.chdir(tmp_path)
    command = {"_target_": "torch.utils.collect_env.run", "command": "touch executed"}
    block = {"_target_": target, "_partial_": True, "config": "${oc.create:" + json.dumps(command) + "}"}
    assert main(["inspect", str(stranger(block=block))]) == 2
    assert "not a class of polarlm" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not a subclass of"):  # typed by the user: only mixers
        build_model({"model": MODEL, "block": {"_target_": target}}, 32)
    assert not (tmp_path / "executed").exists()


def test_a_class_of_the_user_counts_when_typed_and_in_stored_runs_of_trusted_modules(stranger, tmp_path, monkeypatch):
    (tmp_path / "configs" / "block").mkdir(parents=True)
    (tmp_path / "configs" / "block" / "mine.yaml").write_text("_target_: my_blocks.Mine\n")
    code = "from polarlm.attention import StandardAttention\nclass Mine(StandardAttention): pass\n"
    (tmp_path / "my_blocks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    block = {**stranger.own["block"], "_target_": "my_blocks.Mine"}
    assert type(build_model({"model": MODEL, "block": block}, 32).blocks[0].mixer).__name__ == "Mine"
    with pytest.raises(UserError, match="POLARLM_TRUST"):
        restore_run(stranger(block=block))
    assert type(restore_run(stranger.folder, typed=True).model.blocks[0].mixer).__name__ == "Mine"
    monkeypatch.setenv("POLARLM_TRUST", "other,my_blocks")
    assert type(restore_run(stranger.folder).model.blocks[0].mixer).__name__ == "Mine"


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


@pytest.mark.parametrize(
    ("old_form", "change"),
    [
        (False, {"transport": None}),
        (False, {"influence": {"nu_t": 3.0}}),
        (False, {"step": {"kind": ["tangent"]}}),
        (True, {"magnitude": ["own"]}),
        (True, {"retract": {"kind": "norm"}}),
        (True, {"project_stream": []}),
        (True, {"frame": [1]}),
    ],
)
def test_a_block_without_all_its_parts_is_one_sentence_and_compared_without(old_form, change, tmp_path):
    block = block_settings("polar")
    block = (flat_block(block) if old_form else block) | change
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"block": block, "seed": 3}))
    with pytest.raises(UserError, match=rf"config\.yaml can't be read: block\.{next(iter(change))}.* must be "):
        read_config(tmp_path / "config.yaml")
    run = read_run(tmp_path)
    assert run.settings == {} and "config.yaml: block." in run.problems[0]


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
        ("model", {"ffn_width": 2**24}), ("model", {"head_dim": 2**17, "n_head": 4096}),
        ("model", {"ffn": "gelu", "ffn_mult": 1024}),
        ("model", {"context": 10**12}), ("model", {"n_head": "2"}), ("model", {"d_model": [32]}),
        ("model", [1]), ("model", None), ("block", None), ("data", None), ("choices", [1]), ("trainer", "x"),
    ],
)  # fmt: skip
def test_a_size_that_was_made_up_costs_no_memory_and_a_missing_part_is_named(stranger, group, changes):
    value = {**stranger.own[group], **changes} if isinstance(changes, dict) else changes
    with pytest.raises(UserError, match=group):
        restore_run(stranger(**{group: value}))


def test_an_orthonormal_output_is_compared_by_its_shape_too():
    polar = {"_target_": "polarlm.attention.PolarAttention", "_partial_": True, "norm_position": "post"}
    config = {"model": MODEL, "block": {**polar, "tie_output": True}}
    weights = build_model(config, 32).state_dict()
    require_shapes(config, weights, "damaged", stored=True)
    weights["blocks.0.mixer.v.parametrizations.weight.original"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"damaged: it has \(3, 3\) for blocks\.0\.mixer\.v"):
        require_shapes(config, weights, "damaged", stored=True)


def test_a_long_context_or_large_batch_that_was_made_up_is_not_computed(stranger):
    model, trainer = stranger.own["model"] | {"context": 2**22}, stranger.own["trainer"] | {"micro_batch_tokens": 2**50}
    described = describe_run(restore_run(stranger(model=model, trainer=trainer), "cpu"))
    assert "micro-batch of 8 × 2,048 tokens" in described


def test_a_terminal_is_not_steered_by_what_is_inspected_or_refused(stranger, capsys):
    folder = stranger(seed="\x1b[2J", tokenizer={"kind": "\x1b[2J"})
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(stranger(block={**stranger.own["block"], "\x1b[2J": 1}))]) == 2
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err and "\\x1b[2J" in output.out and "\\x1b[2J" in output.err


def test_no_verb_prints_control_characters_of_a_run(stranger, tmp_path, capsys):
    for number, label in enumerate(("\x1b[2J\x9b", "plain")):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        config = {**stranger.own, "group": label, "name": label, "choices": stranger.own["choices"] | {"block": label}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        summary = {"status": "finished", "val/loss": 1.0 + number, "group": label, "seed": number, "block": label}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert main(["compare", str(tmp_path), "--text"]) == 0
    output = capsys.readouterr().out
    assert "plain" in output and not {"\x1b", "\x9b"} & set(output)
    VisibleOutput(sys.stdout).writelines(["a\x1b[2J", "\ud800\n"])
    assert capsys.readouterr().out == "a\\x1b[2J\\ud800\n"


def test_a_run_with_half_a_surrogate_pair_is_named_and_the_others_are_compared(stranger, tmp_path, capsys):
    for number, sample in enumerate((r"\ud800", "fine", "good")):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(stranger.own))
        text = f'{{"status": "finished", "val/loss": {1 + number}, "seed": {number}, "sample": "{sample}"}}'
        (folder / "summary.json").write_text(text)
        (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
        with open(folder / "metrics.jsonl", "a") as rows:
            rows.write(f'{{"step": 2, "train/loss": 1.0, "note": "{sample}"}}\n')
    assert main(["compare", str(tmp_path), "--text", "--out", str(tmp_path / "page.html")]) == 0
    assert "summary.json" in capsys.readouterr().out and (tmp_path / "page.html").stat().st_size > 1000
    assert any("summary.json" in problem for problem in read_run(tmp_path / "run0").problems)


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


@pytest.mark.parametrize(
    ("data", "tokenizer"),
    [
        ({"path": "SECRET"}, {}), ({"url": "https://SECRET/ping"}, {}), ({"hub": {"name": "SECRET/x"}}, {}),
        ({"local": "../../SECRET"}, {}), ({}, {"kind": "file", "path": "SECRET"}),
        ({}, {"kind": "hub", "hub": "SECRET/x"}),
        ({"source": "mixture", "parts": {"a": {"path": "SECRET"}}, "weights": {"a": 1}}, {}),
    ],
)  # fmt: skip
def test_judging_an_untrusted_run_reads_only_text_that_the_user_names(stranger, tmp_path, monkeypatch, data, tokenizer):
    (tmp_path / "SECRET").write_text("mine " * 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polarlm.launch.protocols.build_corpus", lambda *a: pytest.fail("it was looked for"))
    own = stranger.own
    run = restore_run(stranger(data=own["data"] | data, tokenizer=own["tokenizer"] | tokenizer), "cpu")
    options = {"cache_dir": str(tmp_path / "cache"), "trust_data": False}
    with pytest.raises(UserError, match=r"SECRET.*--trust-data"):
        corpus_for(run, options)


def test_the_text_of_a_run_is_found_in_the_cache_in_shipped_places_and_where_it_is_trusted(stranger, tmp_path):
    text, cache = tmp_path / "book.txt", tmp_path / "cache"
    text.write_text("A line of the book.\n" * 200)
    data = {"name": "text", "path": str(text), "mask_documents": False}
    run = restore_run(stranger(data=data), "cpu")
    options = {"cache_dir": str(cache), "trust_data": True}
    corpus = build_corpus(data, {"kind": "byte"}, tmp_path / "elsewhere")
    (run.folder / "corpus.json").write_text(json.dumps({"fingerprint": corpus.fingerprint}))
    assert corpus_for(run, options).fingerprint == corpus.fingerprint  # trusted, and prepared by this
    text.unlink()
    assert corpus_for(run, {**options, "trust_data": False}).fingerprint == corpus.fingerprint  # in the cache
    assert foreign_places({"data": shipped_settings("data", "wikitext2"), "tokenizer": {"kind": "byte"}}) == []
    (run.folder / "corpus.json").unlink()


def test_the_name_of_a_corpus_or_choice_does_not_lead_elsewhere(tmp_path):
    protocol = {"name": "windows", "data": "x/../../../out", "split": "val"}
    path = write_evaluation(tmp_path / "run", {"protocol": protocol})
    assert path.parent == tmp_path / "run" / "evaluations" and list(tmp_path.iterdir()) == [tmp_path / "run"]
    with pytest.raises(FileNotFoundError, match="evaluations"):
        read_arrays(tmp_path / "run", {"arrays": "../../other.npz"})
    for name in ("../block/polar", "a" * 5000):
        assert default_settings({"block": name})[1]["choices"]["block"] == "standard"
        assert shipped_settings("block", name) == {}


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
    monkeypatch.setattr(atomic, "ALWAYS_ALLOWED", 1 << 20)
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
