"""How long jobs will take: kinds are measured once, lengths differ by their steps, other machines are not guessed."""

import copy

import pytest

from polarlm.jobs import estimate
from polarlm.launch.overrides import config_loader, plan_jobs


@pytest.fixture(scope="module")
def base():
    (job,) = plan_jobs(config_loader(), "train", ["trainer=cpu", "model=tiny"], multirun=False).jobs
    return job.config


def varied(base, seed=1, steps=1000, width=None, block=None):
    config = copy.deepcopy(base)
    config["seed"], config["trainer"]["max_steps"] = seed, steps
    config["model"]["d_model"] = width or config["model"]["d_model"]
    config["choices"]["block"] = block or config["choices"]["block"]
    return config


def test_every_kind_is_measured_once_and_the_steps_are_counted(base, monkeypatch):
    asked = []
    monkeypatch.setattr(
        estimate, "measure_kinds", lambda kinds, threads: asked.append(len(kinds)) or dict.fromkeys(kinds, 0.5)
    )
    jobs = [varied(base, seed) for seed in (1, 2)] + [varied(base, steps=200), varied(base, width=64)]
    assert estimate.seconds_of_jobs(jobs) == [500, 500, 100, 500]
    assert asked == [2]  # seeds and lengths do not change a step; a width does


def test_of_many_kinds_one_per_block_is_measured_and_flops_do_the_rest(base, monkeypatch):
    monkeypatch.setattr(estimate, "MOST_KINDS", 1)
    monkeypatch.setattr(estimate, "flops_of_step", lambda config: config["model"]["d_model"])
    monkeypatch.setattr(estimate, "measure_kinds", lambda kinds, threads: dict.fromkeys(kinds, 2.0))
    jobs = [varied(base, width=32), varied(base, width=64), varied(base, width=128)]
    assert estimate.seconds_of_jobs(jobs) == [500, 1000, 2000]  # the last of the block was measured


def test_short_sweeps_are_not_measured(base):
    assert estimate.seconds_of_jobs([varied(base, steps=20)]) is None


@pytest.mark.parametrize(("tokenizer", "size"), [("byte", 257), ("gpt2", 50257), ("char", 100)])
def test_a_step_is_measured_with_the_vocabulary_that_the_tokenizer_will_have(tokenizer, size):
    (job,) = plan_jobs(config_loader(), "train", [f"tokenizer={tokenizer}"], multirun=False).jobs
    assert job.config is not None and estimate.likely_vocabulary(job.config) == size
