"""What is typed is checked before Hydra composes it: choices, keys, sweeps."""

import pytest
from hydra.errors import HydraException

from polarlm.errors import UserError
from polarlm.launch.entry import exit_code, message, split_arguments
from polarlm.launch.overrides import config_loader, plan_jobs


@pytest.fixture(scope="module")
def loader():
    return config_loader()


def plan(loader, *overrides, config="train", multirun=False):
    return plan_jobs(loader, config, list(overrides), multirun=multirun)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("experiment=nonexistent", ["experiment=nonexistent", "shakespeare_char_cpu"]),
        ("experiment=gpt_124m", ["gpt2_124m"]),
        ("sweep=nuu", ["Did you mean nu"]),
        ("block=plar", ["block=plar", "Did you mean polar"]),
        ("block=null", ["block=None"]),
        ("experiment=null", ["experiment=None"]),
        ("hydra/launcher=nowhere", ["basic"]),
        ("block.nu=3", ["block.nu"]),
        ("trainer.max_step=3", ["trainer.max_steps"]),
        ("max_steps=3", ["trainer.max_steps"]),
        ("hydra.nothing=3", ["hydra.nothing"]),
        ("+seed=3", ["without the +"]),
        ("~optim", ["optim"]),
        ("~seeed", ["seed"]),
        ("polar", ["key=value"]),
        ("optim.lr=[1", ["optim.lr"]),
        ("seed=1,2", ["add -m"]),
        ("seed=range(1,3)", ["add -m"]),
    ],
)
def test_a_wrong_word_is_refused_and_the_nearest_right_one_named(loader, typed, words):
    with pytest.raises(UserError) as refused:
        plan(loader, typed)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_evaluation_takes_another_corpus_but_no_block(loader):
    plan(loader, "checkpoint=x", "data=text", "data.path=y", config="eval")
    with pytest.raises(UserError, match="no 'block'"):
        plan(loader, "checkpoint=x", "block=polar", config="eval")


def test_a_key_that_only_some_blocks_of_a_sweep_have_is_refused_for_the_others(loader):
    with pytest.raises(UserError, match=r"'block\.nu' with block=standard"):
        plan(loader, "block=polar,standard", "block.nu=1", multirun=True)
    assert len(plan(loader, "block=polar,rfa", "block.mu=0,1", multirun=True).jobs) == 4


def test_what_exists_is_accepted(loader):
    mixture = ("data=mixture", "+data@data.parts.code=pydocs", "+data@data.parts.plays=shakespeare")
    made = plan(loader, "optim.betas.1=0.9", "+note=mine", *mixture, "data.weights={code:0.7,plays:0.3}")
    assert not made.multirun and len(made.jobs) == 1 and made.varied == []


@pytest.mark.parametrize("typed", ["sweep=nu", "+sweep=nu"])
def test_a_named_sweep_needs_neither_plus_nor_flag(loader, typed):
    made = plan(loader, typed, "seed=1,2")
    assert made.multirun and len(made.jobs) == 12  # the command line wins over the sweep's own three seeds
    assert made.varied == ["block.nu", "seed"] and made.overrides == ["sweep=nu", "seed=1,2"]


def test_a_wrong_value_in_one_job_leaves_the_other_jobs_alone(loader):
    made = plan(loader, "model.n_head=2,3,4", multirun=True)
    assert [job.error is None for job in made.jobs] == [True, False, True]
    assert "model.n_head=3" in str(made.jobs[1].error)


def test_values_arrive_with_their_types(loader):
    (job,) = plan(loader, "trainer.max_tokens=2e6", "optim.lr=1", "name=7").jobs
    assert job.config["trainer"]["max_tokens"] == 2_000_000 and isinstance(job.config["trainer"]["max_tokens"], int)
    assert isinstance(job.config["optim"]["lr"], float)


def test_an_interval_cannot_be_swept(loader):
    with pytest.raises(UserError, match="interval"):
        plan(loader, "optim.lr=interval(0,1)", multirun=True)


def test_flags_may_stand_anywhere_and_wrong_ones_are_named():
    assert split_arguments(["seed=1", "-m", "block=polar"]) == ({"multirun"}, ["seed=1", "block=polar"])
    with pytest.raises(UserError, match="Did you mean --multirun"):
        split_arguments(["seed=1", "--multrun"])
    with pytest.raises(UserError, match="can't be read"):
        split_arguments(["--cfg", "everything"])


def test_a_folder_configs_where_the_command_is_typed_adds_choices(tmp_path, monkeypatch):
    (tmp_path / "configs" / "block").mkdir(parents=True)
    (tmp_path / "configs" / "block" / "mine.yaml").write_text("defaults: [standard, _self_]\nqk_norm: true\n")
    monkeypatch.chdir(tmp_path)
    (job,) = plan(config_loader(), "block=mine", "block.qk_norm=false").jobs
    assert job.config["block"]["qk_norm"] is False and job.config["choices"]["block"] == "mine"
    (tmp_path / "configs" / "block" / "other.yaml").write_text("_target_: my.Block\nstep: {size: 1.0}\n")
    (job,) = plan(config_loader(), "block=other", "block.step.size=2.0").jobs
    assert job.config["block"]["step"] == {"size": 2.0}  # a mapping without a kind is no part


@pytest.mark.parametrize("text", ["a: [", "a: 1\na: 2\n", "7", "defaults: standard\n", "\0", "a: &x {b: *x}\n"])
def test_a_yaml_of_the_user_that_is_none_is_one_sentence(text, tmp_path, monkeypatch):
    (tmp_path / "configs" / "block").mkdir(parents=True)
    (tmp_path / "configs" / "block" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, HydraException)) as refused:
        plan(config_loader(), "block=mine")
    assert exit_code(refused.value) == 2 and "\n" not in message(refused.value)


@pytest.mark.parametrize(
    "hydra",
    [
        "callbacks: {x: {_target_: torch.utils.collect_env.run, command: touch executed}}",
        'job_logging: {formatters: {x: {"()": os.system, command: touch executed}}}',
        "job: {env_set: {LD_PRELOAD: theirs.so}}",
        "run: {dir: elsewhere}",
        "sweeper: {params: {hydra.job.env_set: '{LD_PRELOAD: theirs.so}'}}",
    ],
)
def test_a_yaml_does_not_make_hydra_call_functions_or_write_elsewhere(hydra, tmp_path, monkeypatch):
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "nice.yaml").write_text(f"# @package _global_\nhydra:\n  {hydra}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"hydra\..*on the command line"):
        plan(config_loader(), "experiment=nice")
    assert plan(config_loader(), "hydra.job.chdir=false").jobs  # the user's own word counts
