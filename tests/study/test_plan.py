"""The plan: what is asked for, in which order, and what a search decides."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from polarlm.block_keys import expanded
from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.locations import CONFIGS
from polarlm.runs.identity import identity_of
from study.jobs import Planner, best_value, next_values, settings_of
from study.plan import QUICK, Tuning, plan_files, read_question, read_questions
from study.run import Study, estimate, sizes
from tests.study.made_up import question

QUESTIONS = sorted(plan_files())


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_shipped_plan_names_blocks_that_exist_and_says_when_it_ends(name):
    asked = read_question(name)
    assert asked.rule and asked.question
    for part in asked.parts.values():
        for variant in part.variants:
            chosen = dict(text.split("=", 1) for text in expanded(settings_of(asked, part, variant)))
            for group in ("block", "data", "optim", "experiment", "recipe", "tokenizer"):
                if group in chosen:
                    assert (CONFIGS / group / f"{chosen[group]}.yaml").exists(), chosen[group]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_shipped_plan_composes(name):
    asked, planner = read_question(name), Planner()
    for key, part in asked.parts.items():
        job = planner.job(asked, key, list(part.variants)[-1], "seeds", None, asked.seeds_of(part)[0])
        assert job.identity


def test_all_is_every_question_in_its_order_but_not_those_that_want_to_be_named():
    numbers = [asked.number for asked in read_questions("all")]
    assert numbers == sorted(numbers)
    assert set(QUESTIONS) - {asked.name for asked in read_questions("all")} == {
        QUICK,
        "costs",
        "defaults",
        "gpu",
        "ladder_compute",
        "own",
        "protocols",
        "rfa_table",
    }
    (baselines,) = (asked for asked in read_questions("all") if asked.name == "baselines")
    everything = read_question("baselines").parts
    assert [name for name in everything if name not in baselines.parts] == ["wikitext2"]  # by name it is there


def test_a_wrong_name_says_the_nearest():
    with pytest.raises(UserError, match="Did you mean ladder"):
        read_question("lader")


def test_the_search_is_extended_while_the_best_lies_at_an_end():
    tune = Tuning(values=(1.0, 2.0, 4.0), extend=1)
    assert next_values(tune, {}) == [1.0, 2.0, 4.0]
    assert next_values(tune, {1.0: 3.0, 2.0: 2.0, 4.0: 2.5}) == []
    assert next_values(tune, {1.0: 3.0, 2.0: 2.0, 4.0: 1.5}) == [8.0]
    assert next_values(tune, {1.0: 3.0, 2.0: 2.0, 4.0: 1.5, 8.0: 1.0}) == []  # extended once, as planned
    assert next_values(tune, {1.0: 1.0, 2.0: 2.0, 4.0: 1.5}) == [0.5]
    assert next_values(tune, {1.0: 3.0, 2.0: 2.0, 4.0: None}) == []  # not decided yet


def test_the_best_value_is_the_lowest_loss_and_never_a_failed_run():
    assert best_value({1.0: math.inf, 2.0: 3.0, 4.0: math.nan}) == 2.0
    assert best_value({1.0: 3.0, 2.0: None}) is None
    assert best_value({1.0: math.inf}) is None


def test_seeds_are_named_once_the_search_has_chosen():
    asked, planner = (
        question(tune={"values": [1e-3, 2e-3], "extend": 0, "settings": ["trainer.max_steps=5"]}),
        Planner(),
    )
    first = planner.ready(asked, lambda identity: None)
    assert {job.stage for job in first} == {"tune"} and len(first) == 4
    losses = {job.identity: job.value if job.variant == "polar" else -job.value for job in first}
    jobs = [job for job in planner.ready(asked, losses.get) if job.stage == "seeds"]
    assert {(job.variant, job.value, job.seed) for job in jobs} == {
        *(("standard", 2e-3, seed) for seed in (1, 2, 3)),
        *(("polar", 1e-3, seed) for seed in (1, 2, 3)),
    }
    # The short way of making a configuration gives what Hydra gives.
    (composed,) = plan_jobs(config_loader(), "train", list(jobs[-1].overrides), multirun=False).jobs
    assert identity_of(composed.config) == jobs[-1].identity


def test_the_first_seed_of_all_variants_comes_before_their_second():
    jobs = Planner().ready(question(), lambda identity: None)
    assert [(job.variant, job.seed) for job in jobs] == [(v, seed) for seed in (1, 2, 3) for v in ("standard", "polar")]


def test_a_seed_that_chose_a_value_can_not_be_judged(tmp_path, monkeypatch):
    (tmp_path / "configs" / "study").mkdir(parents=True)
    text = (
        "number: 1\ntitle: t\nquestion: q\nrule: r\nseeds: [1]\nparts: {a: {title: a, baseline: b, variants: {b: []}, "
    )
    (tmp_path / "configs" / "study" / "mine.yaml").write_text(text + "tune: {values: [1], seed: 1}}}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"seed 1 chooses the optim\.lr"):
        read_question("mine")


def test_the_plan_of_the_published_table_has_its_parameters_and_needs_no_gpu_to_be_shown():
    question = read_question("rfa_table")
    study = Study(
        [replace(question, parts={"published": question.parts["published"]})], Path("nowhere"), Path("nowhere")
    )
    (lines,) = sizes(study).values()
    assert {name: round(parameters / 1e6, 2) for name, parameters, _ in lines if "rfa" in name or "rope" in name} == {
        "rope": 19.36, "rope_decay": 19.36, "rfa": 19.36,
        "sc_rfa_0_05": 19.36, "sc_rfa_5": 19.36, "sc_rfa_0_05_as_coded": 19.36,
    }  # fmt: skip
    assert all(abs(parameters - 19.36e6) < 0.03e6 for _, parameters, _ in lines)
    assert estimate(study, 1, 1) == ""
