"""match=: the budget becomes the reference's to half a percent, or the command says why it can't."""

import json

import pytest

from polarlm.errors import UserError
from polarlm.launch import match
from polarlm.launch.match import apply_match, match_steps, match_width
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.model.build import build_model
from polarlm.runs.identity import differences, experiment_of, identity_of
from polarlm.training import batching

VOCABULARY = 97
SMALL = ["model.d_model=64", "model.n_layer=2", "model.context=32", "trainer.batch_tokens=128"]


@pytest.fixture(autouse=True)
def no_corpus(monkeypatch):
    monkeypatch.setattr(match, "_vocabulary", lambda config: VOCABULARY)


def config(*overrides: str) -> dict:
    (job,) = plan_jobs(config_loader(), "train", [*SMALL, *overrides], multirun=False).jobs
    if job.error:
        raise job.error
    return job.config


def cost(what: str, settings: dict) -> float:
    model = build_model(settings, VOCABULARY)
    return model.parameter_count() if what == "parameters" else model.flops_per_token()


@pytest.mark.parametrize("what", ["parameters", "flops"])
@pytest.mark.parametrize(
    ("block", "recipe"),
    [("polar", "default"), ("rfa", "modern"), ("polar_literal", "default"), ("polar block.lift=2", "modern")],
)
def test_the_budget_is_the_references_to_half_a_percent(block, what, recipe, capsys):
    asked = config(*f"block={block} match={what} recipe={recipe}".split())
    reference = cost(what, config("block=standard", f"recipe={recipe}"))
    solved = apply_match(asked)
    assert cost(what, solved) == pytest.approx(reference, rel=0.005)
    assert solved["matched"]["gap"] == pytest.approx(cost(what, solved) / reference - 1, abs=1e-9)
    assert solved["model"]["ffn_width"] == solved["matched"]["to"]
    assert f"match={what}: model.ffn_width None → {solved['matched']['to']}" in capsys.readouterr().err
    # It is the same question, so the plan of a sweep and a killed run find it again.
    assert identity_of(solved) == identity_of(asked)
    assert differences(experiment_of(solved), experiment_of(asked)) == []
    assert identity_of(solved) != identity_of(config(f"block={block.split()[0]}"))


def test_a_block_that_costs_much_more_gets_a_narrower_feed_forward():
    before = cost("parameters", config("block=polar", "block.lift=2"))
    solved = apply_match(config("block=polar", "block.lift=2", "match=parameters"))
    assert cost("parameters", solved) < 0.9 * before
    assert solved["model"]["ffn_width"] < 192


def test_the_reference_itself_is_left_alone(capsys):
    asked = config("block=standard", "match=flops")
    assert apply_match(asked) == asked
    assert "nothing to change" in capsys.readouterr().err
    assert apply_match(config("block=polar")) == config("block=polar")
    changed = apply_match(config("block=standard", "block.head_gate=true", "match=flops"))  # is not the reference
    assert changed["matched"]["gap"] != 0


def test_the_reference_is_the_block_that_was_named():
    solved = apply_match(config("block=standard", "match=parameters", "match_block=polar_literal"))
    assert cost("parameters", solved) == pytest.approx(cost("parameters", config("block=polar_literal")), rel=0.005)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["match=parameters", "model.ffn_width=96"], "match=parameters solves model.ffn_width"),
        (["match=seconds", "trainer.max_tokens=1e6"], "match=seconds solves trainer.max_steps"),
        (["match=parameters", "block=polar_literal", "model.ffn_mult=0.1"], "match=parameters: with a feed-forward"),
    ],
)
def test_what_cannot_be_matched_is_refused_with_the_reason(overrides, message):
    with pytest.raises(UserError, match=message):
        apply_match(config("block=polar", *overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("match=time", "parameters, flops, seconds"),
        ("match_block=polr", "match_block=polr does not exist. Did you mean"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_built(override, message):
    with pytest.raises(UserError, match=message):
        config("block=polar", override)


def test_seconds_are_matched_by_steps_that_all_seeds_share(tmp_path, monkeypatch):
    measured = []

    def times(configs, vocabulary):
        measured.append([c["block"]["_target_"].rpartition(".")[2] for c in configs])
        return [0.3, 0.2]

    monkeypatch.setattr(batching, "seconds_per_step", times)
    asked = [
        config("block=polar", "match=seconds", "trainer.max_steps=900", f"seed={n}", f"runs_dir={tmp_path}")
        for n in (1, 2)
    ]
    solved = [apply_match(one) for one in asked]
    assert [one["trainer"]["max_steps"] for one in solved] == [600, 600]
    assert measured == [["PolarAttention", "StandardAttention"]]  # once, for both seeds
    assert identity_of(solved[0]) == identity_of(asked[0])
    longer = config("block=polar", "match=seconds", "trainer.max_steps=9000", f"runs_dir={tmp_path}")
    assert identity_of(apply_match(longer)) != identity_of(solved[0])
    assert len(measured) == 1
    (note,) = (tmp_path / ".match").iterdir()
    assert json.loads(note.read_text()) == {"own": 0.3, "reference": 0.2}


def test_steps_are_timed_as_they_are_trained(monkeypatch):
    monkeypatch.setattr(batching, "STEP_SECONDS", 0.0)
    asked = config("block=polar", "recipe=modern", "trainer.micro_batch_tokens=64")
    own, other = batching.seconds_per_step([asked, {**asked, "block": config("block=standard")["block"]}], VOCABULARY)
    assert own > 0 and other > 0


def transformer(width, extra=0):
    """Parameters of four layers of d 128 with a gated feed-forward of this width."""
    return 4 * (4 * 128 * 128 + 3 * 128 * width + extra) + 4096 * 128


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_width_found_is_the_nearest_one_and_within_half_a_percent(multiple):
    target = transformer(344)
    solved = match_width(lambda width: transformer(width, extra=20_000), target, what="parameters", multiple=multiple)
    assert solved.value % multiple == 0
    assert abs(solved.gap) <= 0.005
    assert solved.cost == transformer(solved.value, extra=20_000)
    nearest = min(range(multiple, 600, multiple), key=lambda w: abs(transformer(w, extra=20_000) - target))
    assert solved.value == nearest


def test_equal_blocks_keep_their_width():
    assert match_width(transformer, transformer(344), what="parameters").value == 344


def test_a_width_that_does_not_come_near_enough_is_refused():
    with pytest.raises(UserError, match=r"match=parameters: with a feed-forward width of only 8 .* fewer layers"):
        match_width(lambda w: transformer(w, extra=10**6), transformer(344), what="parameters", multiple=8)
    with pytest.raises(UserError, match=r"match=flops: the nearest .* width, \d+, gives .* allowed are ±0.5 %"):
        match_width(transformer, transformer(344) * 1.02, what="flops", multiple=256)


def test_steps_are_found_for_equal_seconds():
    solved = match_steps(seconds_per_step=0.11, target_seconds=100.0)
    assert solved.value == 909
    assert abs(solved.gap) <= 0.005
    with pytest.raises(UserError, match="match=seconds: 3 steps take"):
        match_steps(0.3, 1.0)
