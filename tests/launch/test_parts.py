"""Parts of a block on the command line: chosen by name, refused with one sentence that names what was typed."""

import pytest

from polarlm.block_keys import PARTS, part_choices
from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs


def block_of(*typed: str) -> dict:
    (job,) = plan_jobs(config_loader(), "train", list(typed), multirun=False).jobs
    assert job.config is not None
    return job.config["block"]


@pytest.mark.parametrize(("part", "choice"), [(part, choice) for part in PARTS for choice in part_choices(part)])
def test_every_choice_can_be_typed(part, choice):
    assert block_of("block=polar", f"block/{part}={choice}")[part]["kind"] == choice


def test_a_symbol_reaches_the_parts_that_use_it():
    block = block_of("block=polar", "block/radial=own", "block.beta=0.3", "block.eta=0.2", "block.nu=5")
    assert block["radial"]["beta"] == 0.3 and block["influence"]["nu_t"] == 5
    assert block["influence"]["eta_tq"] == block["precision"]["eta_tk"] == 0.2


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["block.beta=0.3"], ["block.beta=0.3", "block/radial=own"]),
        (["block/influence=exponential", "block.nu=5"], ["block.nu=5", "block/influence=student"]),
        (["block/influence=exponental"], ["exponential, gaussian, student"]),
        (["block/radial=own", "block/inputs=raw_values"], ["block/radial=own", "block/inputs=sphere"]),
        (["block/radial=own", "block/precision=unit"], ["block/radial=own", "block/precision"]),
        (["block/step=retracted", "block.step.projection=none"], ["block/step=retracted", "block.step.projection"]),
        (["block/aggregate=gate", "block/influence=exponential", "block.influence.residual_form=dot"],
         ["block/aggregate=gate", "block.influence.residual_form=full"]),
        (["block/aggregate=complex", "block.aggregate.radial_correlation=qk"], ["radial_correlation=qk", "vv or one"]),
        (["block/aggregate=gate", "block/radial=own", "block.aggregate.eta_rk=0.5"],
         ["block.aggregate.eta_rk=0.5", "block.radial.eta_rk"]),
        (["block.eta=0", "block.precision.sigma_t0=0"], ["block.precision.eta_tk", "infinite precision"]),
        (["block/precision=carried", "block.step.projection=none"],
         ["block/precision=carried damps", "block.step.projection=per_head, global or evidence"]),
        (["block/precision=carried", "block.precision.prior_share=0", "block.precision.widen_q=[0,0,0,0]"],
         ["block/precision=carried has no effect", "block.step.projection=per_head"]),
        (["block/precision=equilibrium", "block.mu=0"], ["block/precision=equilibrium", "block.mu, which is 0"]),
        (["block/precision=carried", "block.precision.m_eq=2", "block.mu=0"], ["block.precision.m_eq=null"]),
        (["block.precision.sigma_t0=[]"], ["block.precision.sigma_t0 has 0 values"]),
        (["block.frozen=[alpha,nut]"], ["'nut'", "nu_t"]),
        (["block.influence.tau=2"], ["block.influence.tau"]),
        (["block.influence.nu_t=-1"], ["block.influence.nu_t=-1"]),
    ],
)  # fmt: skip
def test_parts_that_contradict_each_other_are_refused_in_the_words_typed(typed, words):
    with pytest.raises(UserError) as refused:
        block_of("block=polar", *typed)
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_other_blocks_have_no_parts():
    with pytest.raises(UserError, match="block=standard has no such part"):
        block_of("block=standard", "block/radial=own")


def test_old_keys_are_answered_with_the_new_ones():
    typed = ["block=polar", "block.nu_t=4", "block.radial=own"]
    plan = plan_jobs(config_loader(), "train", typed, multirun=False)
    assert plan.notes == [
        "block.nu_t=4 is now block.nu=4",
        "block.radial=own is now block/radial=own",
    ]


def test_variants_that_were_files_are_jobs_of_a_sweep():
    plan = plan_jobs(config_loader(), "train", ["block=standard,polar_constant,polar_paper"], multirun=True)
    kinds = [job.config["block"].get("influence", {}).get("kind") for job in plan.jobs if job.config]
    assert kinds == [None, "exponential", "student"]
