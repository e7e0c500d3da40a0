import json

import pytest
import yaml

from polarlm.errors import UserError
from polarlm.runs.folder import choose_folder
from polarlm.runs.identity import default_name, swept_values


@pytest.fixture
def config(tmp_path):
    return {
        "seed": 1,
        "name": None,
        "resume": "auto",
        "runs_dir": str(tmp_path),
        "trainer": {"max_steps": 5, "devices": 1},
        "choices": {"block": "polar", "model": "nano", "data": "pydocs"},
    }


def settle(folder, config, status):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text(json.dumps({"status": status}))


def test_the_same_command_continues_an_unfinished_run_and_never_overwrites_a_finished_one(config):
    first, again, _ = choose_folder(config)
    assert not again
    settle(first, config, "running")
    assert choose_folder(config)[:2] == (first, True)
    (first / "summary.json").write_text(json.dumps({"status": "finished"}))
    second, again, note = choose_folder(config)
    assert (second.name, again) == (first.name + "-2", False)
    assert str(second) in note


def test_resume_never_starts_beside_an_unfinished_run(config):
    first, _, _ = choose_folder(config)
    settle(first, config, "running")
    assert choose_folder({**config, "resume": "never"})[0].name == first.name + "-2"


def test_an_unfinished_run_with_other_settings_is_not_continued_silently(config):
    named = {**config, "name": "mine"}
    settle(choose_folder(named)[0], named, "running")
    changed = {**named, "trainer": {"max_steps": 9, "devices": 1}}
    with pytest.raises(UserError, match=r"trainer.max_steps: 5 → 9"):
        choose_folder(changed)
    assert choose_folder({**named, "trainer": {"max_steps": 5, "devices": 2}})[1]  # where it runs may change


def test_the_default_name_changes_with_what_decides_the_numbers_and_with_nothing_else(config):
    name = default_name(config)
    assert name.startswith("polar-nano-pydocs-seed1-")
    assert default_name({**config, "logger": {"kind": "none"}}) == name
    assert default_name({**config, "trainer": {"max_steps": 6, "devices": 1}}) != name


def test_a_run_is_continued_by_its_identity_whatever_sweep_has_named_it(config, tmp_path):
    old = tmp_path / default_name(config)
    settle(old, config, "interrupted")
    named = {**config, "name": default_name(config, "nu4")}
    assert named["name"].startswith("polar-nano-pydocs-nu4-seed1-")
    assert choose_folder(named)[:2] == (old, True)
    assert choose_folder({**named, "resume": "never"})[0].name == named["name"]
    assert choose_folder({**config, "name": "mine"})[0].name == "mine"  # a name of one's own is kept
    other = {**named, "seed": 2}
    assert not choose_folder({**other, "name": default_name(other, "nu4")})[1]
    (old / "summary.json").write_text(json.dumps({"status": "finished"}))
    assert choose_folder(named)[0].name == named["name"]


def test_a_folder_is_named_after_what_its_sweep_varies():
    overrides = ["block=polar", "block.nu=4", "optim.lr=1e-3", "block.forgetting=none", "seed=1", "logger=none"]
    swept = {"block", "block.nu", "optim.lr", "block.forgetting", "seed", "logger"}
    assert swept_values(overrides, swept) == "nu4-lr1e-3-forgetting-none"
    assert swept_values(overrides, {"seed", "block"}) == ""
    assert swept_values(["data.path='/a b/$(x)'"], {"data.path"}) == "path-abx"
    assert len(swept_values([f"block.k{i}=12345" for i in range(40)], {f"block.k{i}" for i in range(40)})) <= 80


@pytest.mark.parametrize("name", ["a/b", "../x", "a\nb"])
def test_names_that_are_not_one_folder_are_refused(config, name):
    with pytest.raises(UserError, match="folder name"):
        choose_folder({**config, "name": name})
