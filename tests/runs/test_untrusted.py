"""A run folder from a stranger: refused in one sentence, nothing executed, nothing resolved, nothing endless."""

import json

import pytest
import yaml

from polarlm.errors import UserError
from polarlm.model.build import build_model
from polarlm.runs.files import printable, read_config, read_json
from polarlm.runs.reading import read_run

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


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "x" * (2 << 20), "!!python/object/apply:os.system ['true']"])
def test_a_damaged_configuration_gives_one_sentence(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml can't be read"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["", "{", '{"a": nope}', "[" * 100_000])
def test_a_damaged_summary_gives_one_sentence(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        read_json(tmp_path / "summary.json")


def test_names_can_not_steer_a_terminal(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"choices": {"block": "a\x1b[2Jb"}}))
    (tmp_path / "summary.json").write_text(json.dumps({"name": "x\x1b]0;owned\x07\ny", "status": "finished"}))
    run = read_run(tmp_path)
    assert run.name.isprintable() and run.block.isprintable()
    assert printable("polar κ 1") == "polar κ 1"
