"""Rows → verdicts, tables and pictures; the committed page is what the committed rows give."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from polarlm.errors import UserError
from polarlm.study import results
from polarlm.study.curves import curve_tables
from polarlm.study.judge import check_known, judge_part
from polarlm.study.pictures import forest
from polarlm.study.summaries import Summary, as_run, read_summary, unflatten, write_summary
from tests.study.made_up import question, row, summary

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_committed_rows_give():
    pictures = {}

    def draw(name, judged):
        pictures[name] = forest(judged)
        return f"study/{name}.svg" if pictures[name] else None

    assert results.page(ROOT / "docs" / "study", draw) == (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    pinned = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("matplotlib==")
    )
    if metadata.version("matplotlib") == pinned.split("==")[1].split(";")[0].strip():
        for name, picture in pictures.items():
            if picture:
                assert (ROOT / "docs" / "study" / f"{name}.svg").read_bytes() == picture


def test_the_overview_has_every_finding_below_its_question_and_says_what_was_not_run():
    asked = question()
    judged = judge_part(asked, "letters", summary(-0.02))
    text = results.overview([(asked, {"letters": judged}), (asked, {"letters": None})], {"blocks": {}})
    title, part = f"{asked.number}. {asked.title}", asked.parts["letters"].title
    assert f"- **[{title}](#{results.anchor(title)})**\n  - {part}: {judged.finding}.\n" in text
    assert text.endswith(f"  - Not run yet: {part}.\n")
    assert results.anchor("9. Which `polar`, then?") == "9-which-polar-then"


def test_curves_of_different_protocols_do_not_share_a_table():
    made = summary()
    for tokens, entry in zip((511, 511, 255), made.rows, strict=False):
        curve = {"rate": [0, 0.1], "random": {"loss": [tokens / 1000, 2.0]}}
        entry["evaluations"] = [{"protocol": {"name": "corruption", "tokens": tokens}, "by_corruption": curve}]
    tables = list(curve_tables(judge_part(question(), "letters", made)))
    shown = [("tokens 511" in table, "0.511" in table, "0.255" in table) for table in tables]
    assert shown == [(False, False, True), (True, True, False)]


def test_rows_come_back_from_their_file_and_the_file_is_stable(tmp_path):
    made, asked = summary(), question()
    path = write_summary(tmp_path, made, asked)
    again = read_summary(tmp_path, "blocks")
    assert again.text(asked) == path.read_text() and again.settings == made.settings
    shuffled = Summary("blocks", made.rows[::-1], dict(reversed(made.settings.items())))
    assert shuffled.text(asked) == path.read_text()
    assert len(path.read_text().splitlines()) == 6 + 1 + 2 + len(made.rows)  # a row is a line: readable differences
    assert read_summary(tmp_path, "other").rows == []


def test_what_rows_share_stands_once_and_nothing_is_lost(tmp_path):
    made, asked = Summary("blocks"), question()
    asked.parts["again"] = asked.parts["more"] = asked.parts["letters"]
    settings = {"block.nu": 1, "model.d_model": 8, "trainer.steps": 5}
    for part in ("letters", "again", "more"):
        for variant, nu in (("standard", 1), ("polar", 1.0)):  # equal, but not the same
            for seed in (1, 2):
                more = {"seconds": 11} if (part, variant) == ("more", "polar") else {}
                made.add(row(variant, seed, 2.0 + seed, part=part, **more), {**settings, "block.nu": nu})
    made.add(row("polar", 9, 2.0, stage="tune", value=1e-3, command="python train.py"))
    path = write_summary(tmp_path, made, asked)
    again = read_summary(tmp_path, "blocks")

    def content(summary):
        return sorted(json.dumps(row, sort_keys=True) for row in summary.rows)

    assert content(again) == content(made) and json.dumps(again.settings["letters", "polar"]["block.nu"]) == "1.0"
    lines = path.read_text().splitlines()
    assert sum('"trainer.steps"' in line for line in lines) == 1
    assert sum('"same_as": "letters"' in line for line in lines) == 3  # all of `again`, the baseline of `more`
    assert sum('"torch"' in line for line in lines) == 4  # one per group that is written


@pytest.mark.parametrize("damage", [{"parts": []}, {"groups": [{"part": "a"}]}, {"groups": [1]}, {"settings": 3}])
def test_a_file_that_is_no_summary_is_named(tmp_path, damage):
    stored = {
        "question": "blocks",
        "settings": {},
        "parts": {"a": {"settings": {}, "variants": {"b": {}}}},
        "groups": [],
    }
    (tmp_path / "blocks.json").write_text(json.dumps(stored))
    assert read_summary(tmp_path, "blocks").rows == []
    (tmp_path / "blocks.json").write_text(json.dumps({**stored, **damage}))
    with pytest.raises(UserError, match=r"blocks\.json is no summary of a study"):
        read_summary(tmp_path, "blocks")


def test_a_row_of_the_same_job_replaces_the_older_one():
    made = summary()
    assert made.add(row("polar", 1, 1.5)) is False and len(made.rows) == 6
    assert made.add(row("polar", 4, 1.5)) is True and len(made.rows) == 7


def test_a_clear_difference_is_told_with_its_interval_and_its_costs():
    judged = judge_part(question(), "letters", summary(-0.02))
    polar = judged.lines[1]
    assert polar.outcome == "better" and polar.comparison.difference.mean == pytest.approx(-0.02)
    assert polar.comparison.seeds == (1, 2, 3) and "the tokens" in polar.sentence
    text = results.variants_table(question(), "letters", judged)
    assert "−0.02 (" in text and "| better |" in text and "| 6.00 |" not in text
    assert b"</svg>" in forest(judged) and forest(judged) == forest(judged)


def test_no_verdict_before_the_planned_seeds_are_there():
    made = summary(-0.02)
    made.rows = [r for r in made.rows if r["seed"] < 3]
    assert judge_part(question(), "letters", made).lines[1].outcome == "no difference shown"


def test_a_ladder_compares_each_rung_with_the_one_before():
    judged = judge_part(question(compare="previous", baseline=None), "letters", summary(0.05))
    assert [line.outcome for line in judged.lines] == ["first rung", "worse"]
    assert judged.finding == "polar worse than standard"


def test_the_search_decides_which_seeds_count():
    made = Summary("blocks")
    for value, loss in ((1e-3, 2.0), (2e-3, 1.0)):
        made.add(row("standard", 1000, loss, stage="tune", value=value))
        made.add(row("standard", 1, loss, value=value), {"block._target_": "s"})
    judged = judge_part(question(tune={"values": [1e-3, 2e-3]}), "letters", made)
    (line,) = judged.lines
    assert line.value == 2e-3 and line.losses == {1: 1.0} and judged.finding == "standard: 1 bits per byte"


def test_a_best_value_at_the_end_of_the_search_is_said():
    made, asked = Summary("blocks"), question(tune={"values": [1e-3, 2e-3]})
    for value, loss in ((1e-3, 2.0), (2e-3, 1.0)):
        made.add(row("standard", 1000, loss, stage="tune", value=value))
        made.add(row("standard", 1, loss, value=value), {"block._target_": "s"})

    def said():
        return results.section(asked, {"letters": judge_part(asked, "letters", made)}, {}, lambda *_: None)

    assert "Best at an end of the values that were tried, so perhaps not the best: `standard` (0.002).\n" in said()
    made.add(row("standard", 1000, 3.0, stage="tune", value=4e-3))
    assert "at an end" not in said()


def test_rows_that_the_plan_does_not_know_are_refused():
    made = summary()
    made.add(row("mystery", 1, 1.0))
    with pytest.raises(UserError, match="letters/mystery"):
        check_known(question(), made)


def test_a_row_is_a_run_for_the_verdict():
    run = as_run(row("polar", 3, 1.5), {"model.d_model": 8, "seed": 1}, "val/bits_per_byte")
    assert (run.seed, run.block, run.number("val/bits_per_byte")) == (3, "polar", 1.5)
    assert list(run.metrics.stream("val/bits_per_byte")["tokens"]) == [250, 500, 1000]
    assert unflatten({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_one_command_makes_all_seeds_again():
    rows = [row("polar", 1, 1.0, command="python train.py block=polar runs_dir=x seed=1"), row("polar", 2, 1.0)]
    assert results.command(rows) == "python train.py block=polar -m seed=1,2"


def test_jumps_of_the_loss_are_counted_over_the_seeds_where_every_row_knows_them():
    made = summary()
    assert "jumps" not in results.variants_table(question(), "letters", judge_part(question(), "letters", made))
    for number, known in enumerate(made.rows):
        known["incidents"] = number  # standard: 0, 2, 4; polar: 1, 3, 5
    head, _, standard, polar = results.variants_table(
        question(), "letters", judge_part(question(), "letters", made)
    ).splitlines()
    assert head.endswith("| jumps |") and standard.endswith("| 6 |") and polar.endswith("| 9 |")
