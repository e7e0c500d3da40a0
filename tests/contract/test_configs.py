"""The shipped yaml: ladders differ by one line per rung, sweeps name real choices and count their jobs right."""

import itertools
import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from polarlm.block_keys import expanded, flat_block, part_choices
from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.runs.identity import flatten
from tests.contract.conftest import BLOCKS, CONFIGS

SWEEPS = sorted(path.stem for path in (CONFIGS / "sweep").glob("*.yaml"))
LADDER = ["polar_constant", "polar_distance", "polar_radius", "polar_scalars", "polar_rotated", "polar_sphere"]
LADDER += ["polar_undecayed", "polar_magnitude", "polar_decay", "polar_student", "polar_tangent", "polar_paper"]


def block_config(name: str) -> dict:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("train", expanded([f"block={name}"])).block, resolve=True)


def sweep_parameters(name: str) -> dict[str, list[str]]:
    """Choices of every swept key, split as Hydra's own sweeper splits them."""
    raw = OmegaConf.load(CONFIGS / "sweep" / f"{name}.yaml").hydra.sweeper.params
    choices = {}
    for key, value in raw.items():
        override = OverridesParser.create().parse_override(f"{key}={value}")
        choices[key] = list(override.sweep_string_iterator()) if override.is_sweep_override() else [str(value)]
    return choices


@pytest.mark.parametrize(("lower", "upper"), list(itertools.pairwise(LADDER)))
def test_each_rung_of_the_ladder_changes_one_key(lower, upper):
    before, after = flat_block(block_config(lower)), flat_block(block_config(upper))
    assert before.keys() == after.keys()
    assert len([key for key in before if before[key] != after[key]]) == 1


@pytest.mark.parametrize("name", SWEEPS)
def test_sweep_names_real_choices_and_counts_its_jobs(name):
    text = (CONFIGS / "sweep" / f"{name}.yaml").read_text()
    parameters = sweep_parameters(name)
    jobs = 1
    for values in parameters.values():
        jobs *= len(values)
    assert int(re.search(r"# Jobs: .*= (\d+)\.", text)[1]) == jobs
    assert "# Question: " in text and "# <- what differs" in text
    assert set(parameters["block"]) <= set(BLOCKS)
    keys = dict(flatten(block_config(parameters["block"][0])))
    assert {key.removeprefix("block.") for key in parameters if key.startswith("block.")} <= keys.keys()
    for key in parameters:
        if key.startswith("block/"):
            assert set(parameters[key]) <= set(part_choices(key.removeprefix("block/")))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        assert compose(config_name="train", overrides=[f"sweep={name}"]).group == name


@pytest.mark.parametrize(
    ("typed", "part", "kind"),
    [("radial=off", "radial", "none"), ("magnitude=on", "precision", "magnitude"),
     ("magnitude=off", "precision", "unit"), ("consensus=false", "aggregate", "mean")],
)  # fmt: skip
def test_on_and_off_of_old_command_lines_are_understood(typed, part, kind):
    (job,) = plan_jobs(config_loader(), "train", ["block=polar", f"block.{typed}"], multirun=False).jobs
    assert job.config["block"][part]["kind"] == kind


def test_a_wrong_word_is_not():
    with pytest.raises(UserError, match="none, own, shared"):
        plan_jobs(config_loader(), "train", ["block=polar", "block.radial=of"], multirun=False)
