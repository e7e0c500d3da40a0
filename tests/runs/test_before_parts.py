"""What was stored before the polar block was made of parts is still the same run.

before_parts/ was written by the code of commit 156e438: a run folder, an exported model, the last logits of both, and
the identities of every shipped block and of every study variant.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import Optimizer

from polarlm.attention import MixerShape, PolarAttention
from polarlm.block_keys import current_block, flat_block
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.runs.export.folder import import_run
from polarlm.runs.identity import identity_of
from polarlm.runs.reading import read_run
from polarlm.runs.restore import restore_run
from polarlm.targets import target_of
from polarlm.training.schedules import Schedule
from study.jobs import Planner
from study.plan import read_question

BEFORE = Path(__file__).parent / "before_parts"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())


def last_logits(folder: Path) -> torch.Tensor:
    run = restore_run(folder, "cpu")
    with torch.no_grad():
        return run.model(torch.arange(12)[None] % run.tokenizer.vocab_size)[0, -1]


def test_an_old_run_folder_gives_the_same_numbers():
    assert torch.allclose(last_logits(BEFORE / "run"), torch.tensor(EXPECTED["logits"]["run"]), rtol=1e-5, atol=1e-6)


def test_an_old_export_becomes_a_run_with_the_same_numbers(tmp_path):
    shutil.copytree(BEFORE / "export", tmp_path / "export")
    import_run(tmp_path / "export", tmp_path / "run")
    expected = torch.tensor(EXPECTED["logits"]["export"])
    assert torch.allclose(last_logits(tmp_path / "run"), expected, rtol=1e-5, atol=1e-6)


def test_an_old_run_is_read_in_todays_words():
    settings = read_run(BEFORE / "run").settings
    assert settings["block.nu"] == 5 and settings["block.beta"] == 0.2
    assert settings["block.influence"] == "student" and settings["block.radial.radial_correlation"] == "qk"
    assert "block.influence.nu_t" not in settings  # it is the symbol on top


def test_parameters_are_listed_as_they_were():
    """By this order optimiser states in checkpoints are numbered."""
    every = dict(head_gate=True, value_residual=True, norm_gain="channel", frequencies="learned", transport="unitary")
    every |= dict(radial="own", uncertainty="carry", radial_flow="equilibrium", norm_position="post")
    block = PolarAttention(MixerShape(16, 4, 2, 4, 1, 3), **every, mu_r=0.1, widen_k=0.2, tau=1.0, frozen=[])
    matrices = "q_gain k_gain frequencies.log_frequency qk.weight v.weight out.weight forget.weight forget.offset "
    matrices += "head_gate.weight value_residual.share transport.angles.weight transport.axes.weight"
    scalars = "nu_t prior_share context_power relax_a relax_b widen_q widen_k radius m_inf m_eq mu_r nu_r eta_rq eta_rk"
    scalars += " sigma_r0 alpha beta eta_tk eta_tq sigma_t0 mu gain"
    expected = [*matrices.split(), *(f"estimator.{name}.raw" for name in scalars.split())]
    assert [name for name, _ in block.named_parameters()] == expected


def test_old_settings_and_todays_are_one_experiment():
    stored = yaml.safe_load((BEFORE / "run" / "config.yaml").read_text())
    again = {**stored, "block": current_block(stored["block"])}
    assert again["block"]["influence"]["kind"] == "student"
    assert identity_of(again) == identity_of(stored)


def test_an_old_name_of_an_optimiser_or_schedule_is_the_same_class_and_the_same_experiment():
    stored, read = yaml.safe_load((BEFORE / "run" / "config.yaml").read_text()), read_run(BEFORE / "run").config
    assert stored["optim"]["_target_"] == "polarlm.training.optimisers.adamw.adamw"
    assert read["optim"]["_target_"] == "polarlm.training.optimisers.adamw"
    assert read["schedule"]["_target_"] == "polarlm.training.schedules.Cosine"
    assert identity_of(read) == identity_of(stored)
    for group, kind in (("optim", Optimizer), ("schedule", Schedule)):
        assert target_of(stored[group], group, kind) == target_of(read[group], group, kind)


@pytest.mark.parametrize("block", sorted(EXPECTED["blocks"]))
def test_every_block_has_the_identity_that_it_had(block, capsys):
    (job,) = plan_jobs(config_loader(), "train", [f"block={block}"], multirun=False).jobs
    assert identity_of(job.config)[:16] == EXPECTED["blocks"][block]


def test_every_study_question_recognises_its_rows(capsys):
    """Every sixth variant: composing all of them would take a minute."""
    planner, wrong = Planner(), []
    for key in sorted(EXPECTED["study"])[::6]:
        name, part, variant = key.split("/")
        question = read_question(name)
        seed = question.seeds_of(question.parts[part])[0]
        if planner.job(question, part, variant, "seeds", None, seed).identity[:16] != EXPECTED["study"][key]:
            wrong.append(key)
    assert not wrong


OLD_SETTINGS = {
    "kernel": "exponential", "projection": "global", "radial": "own", "radial_correlation": "qk", "lift": 2,
    "transport": "phases", "magnitude": "unit", "norm_values": False, "tie_output": True, "consensus": "gate",
    "uncertainty": "carry", "radial_flow": "equilibrium", "retract": "exp", "project_stream": "both", "nu_t": 7.0,
    "eta_tk": 0.4, "forgetting": "constant", "irls_steps": 2, "value_residual": True, "frozen": ["mu"],
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_SETTINGS)
def test_an_old_setting_survives_the_way_to_parts_and_back(name):
    stored = yaml.safe_load((BEFORE / "export" / "polarlm_run" / "config.yaml").read_text())["block"]
    stored |= {"retract": "norm"} if name == "projection" else {}
    stored |= {"radial": "own"} if name == "radial_correlation" else {}
    old = stored | {name: OLD_SETTINGS[name]}
    assert flat_block(current_block(old)) == old
