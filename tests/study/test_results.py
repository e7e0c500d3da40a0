"""Rows → verdicts, tables and pictures; the committed page is what the committed rows give."""

import json
import math
import re
from importlib import metadata
from pathlib import Path

import pytest

from polarlm.errors import UserError
from study import pictures, results
from study.judge import check_known, judge_part
from study.numbers import fill
from study.summaries import Summary, as_run, read_summary, unflatten, write_summary
from tests.study.made_up import question, row, summary

ROOT = Path(__file__).resolve().parents[2]


SUMMARIES = ROOT / "docs" / "study"


@pytest.fixture(scope="module")
def answers():
    return results.read_answers(SUMMARIES)


def test_the_committed_page_is_what_the_committed_rows_give(answers):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results.page(answers, SUMMARIES) == page
    assert len(page.splitlines()) <= 400
    assert re.findall(r"^## (\d+)\.", page, re.MULTILINE) == [str(n) for n in range(1, 14)]  # no gaps


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_committed_picture_is_drawn_from_the_committed_rows(name, answers):
    path = SUMMARIES / f"{name}.svg"
    date, rows = pictures.picture_origin(path)
    assert rows == pictures.rows_hash(SUMMARIES), f"{path} is older than its rows: run {results.COMMAND}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and results.COMMAND in path.read_text(encoding="utf-8")
    pinned = re.search(r"^matplotlib==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    if metadata.version("matplotlib") == pinned:
        assert pictures.svg(pictures.PICTURES[name](answers), date, rows) == path.read_text(encoding="utf-8")


def test_the_overview_draws_the_numbers_of_the_tables(answers):
    drawn = {}
    for line in pictures.draw_overview(answers).axes[0].lines:
        if line.get_gid():
            drawn.setdefault(line.get_gid(), []).append(list(line.get_xdata()))
    bars = pictures.overview_bars(answers)
    assert len(bars) == len(drawn["interval"]) == len(drawn["mean"]) > 30
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for bar, interval, (mean,) in zip(bars, drawn["interval"], drawn["mean"]):
        flip = -1 if bar.group in ("neighbours", "appendix") or bar.label.startswith("polar − ") else 1
        low, high = sorted(flip * end for end in interval)
        shown = f"{results.signed(flip * mean)} ({results.signed(low)} to {results.signed(high)})"
        assert re.search(rf"`{bar.place[2]}` \| [\d.]+ \| {re.escape(shown)} \|", page), (bar, shown)
    # The interval that holds for all comparisons of a table is wider, and finite: no arrow, no end at zero.
    widest = [bar for bar in bars if bar.joint]
    assert [list(bar.joint) for bar in widest] == drawn["joint"]
    assert all(bar.joint[0] <= bar.low and bar.high <= bar.joint[1] for bar in widest)
    assert all(math.isfinite(end) for bar in bars for end in (bar.low, bar.high, *(bar.joint or ())))


def test_the_numbers_of_the_readme_are_those_of_the_rows(answers):
    known = set()
    for judged in (judged for answer in answers for judged in answer.parts.values() if judged):
        for line in judged.lines:
            if line.comparison and line.comparison.difference.low is not None:
                d, baseline = line.comparison.difference, line.comparison.baseline
                shown = f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})".replace("-", "−")
                known.add((line.variant, baseline, shown, str(d.n)))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+? \| `(\w+)` \| `(\w+)` \| (.+?) \| .+? \| (\d) \|$", readme, re.MULTILINE)
    assert len(rows) >= 9 and set(rows) <= known
    lines = [line for answer in answers for judged in answer.parts.values() if judged for line in judged.lines]
    assert f"All {sum(line.comparison is not None for line in lines)} comparisons" in readme


def test_the_length_picture_names_the_block_without_forget_gates(answers):
    labels = [text.get_text() for text in pictures.draw_length(answers).axes[0].get_legend().get_texts()]
    assert "polar (forget gates)" in labels and "polar without forget gates" in labels


def test_a_number_in_a_paragraph_is_the_one_of_the_rows():
    numbers = {"blocks": {"letters": judge_part(question(), "letters", summary(-0.02))}}
    text = fill("{gap letters/polar} below, {value blocks:letters/standard}, {signed letters/polar}", numbers, "blocks")
    assert text == "0.020 below, 2.200, −0.020"
    for wrong in ("{gap letters/standard}", "{gap letters/nobody}", "{gap other/polar}", "{oops letters/polar}"):
        with pytest.raises(UserError, match="does not match any row"):
            fill(wrong, numbers, "blocks")


def test_a_diagnostic_is_told_as_its_range_over_layers():
    judged = judge_part(question(), "letters", summary(-0.02))
    for number, line in enumerate(judged.lines):
        for row_ in line.rows:
            row_["probes"] = {"radial/growth_latent": [0.5 + number, 0.022, 0.082]}
    numbers = {"blocks": {"letters": judged}}
    assert fill("{probe letters/standard radial/growth_latent}", numbers, "blocks") == "0.022–0.5"
    assert fill("{probe letters/polar radial/growth_latent 2}", numbers, "blocks") == "0.022–0.082"


def test_many_variants_that_show_nothing_share_a_row_and_a_difference_that_is_shown_keeps_its_own():
    asked = question(variants={name: [f"block={name}"] for name in ("standard", "polar", *"abcdefg")})
    made = summary(-0.2)
    for name in "abcdefg":
        for seed, noise in ((1, 0.05), (2, -0.04), (3, 0.01)):
            made.add(row(name, seed, 2.0 + 0.1 * seed + noise), {"block._target_": name})
    rows = results.part_rows(asked, asked.parts["letters"], judge_part(asked, "letters", made))
    assert [r[2].partition(":")[0] for r in rows] == ["`polar`", "7 others"]
    assert rows[0][0] == "Letters, 3 seeds" and rows[0][6] == "**better**" and rows[1][6] == "no difference shown"


def test_a_question_without_runs_says_so():
    answer = results.Answer(question(), {"letters": None}, "")
    assert "**Not run yet.** The plan is ready: `configs/study/blocks.yaml`." in results.section(answer, {})


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
    (cells,) = results.part_rows(question(), question().parts["letters"], judged)
    assert cells[4].startswith("−0.0200 (−0.0") and cells[6] == "**better**" and "× FLOPs" in cells[7]


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


def test_runs_that_two_settings_share_are_listed_once():
    asked, judged = question(), judge_part(question(), "letters", summary())
    asked.parts["again"] = asked.parts["letters"]
    text = results.details([results.Answer(asked, {"letters": judged, "again": judged}, "")])
    assert "| blocks/letters |" in text and "blocks/again" not in text


def test_a_best_value_at_the_end_of_the_search_is_said():
    made, asked = Summary("blocks"), question(tune={"values": [1e-3, 2e-3]})
    for value, loss in ((1e-3, 2.0), (2e-3, 1.0)):
        made.add(row("standard", 1000, loss, stage="tune", value=value))
        made.add(row("standard", 1, loss, value=value), {"block._target_": "s"})

    def said():
        (line,) = judge_part(asked, "letters", made).lines
        return results.line_details(line)

    assert said().endswith("searched 0.001 → 1.4000, 0.002 → 0.7000; chose 0.002 (at an end of the search)")
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
