"""From run folders to a verdict: which loss, which baseline, which runs count, and what must be said about it."""

import json

import pytest

from polarlm.errors import UserError
from polarlm.report.tables import final_table, show_count, text_report
from polarlm.runs.reading import read_run
from polarlm.verdict.groups import group_runs
from polarlm.verdict.judgement import headline, judge_groups, seed_losses
from tests.synthetic_runs import write_run, write_sweep


def groups_of(folders):
    return group_runs([read_run(folder) for folder in folders])


def test_blocks_are_judged_on_the_test_split_with_paired_seeds(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    assert judgement.metric == "test/bits_per_byte"
    outcomes = {row.group.label: row.outcome for row in judgement.rows}
    assert outcomes["standard"] == "baseline"
    assert outcomes["polar"] == "better"
    polar = judgement.rows[-1]
    assert polar.comparison.seeds == (1, 2, 3)
    assert polar.comparison.family == 2
    assert "Not matched: FLOPs +22.0 %" in polar.sentence
    assert headline(judgement).startswith("rfa and polar: lower bits per byte than standard")


def test_one_seed_gives_no_verdict(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, seeds=(1,), diagnostics=False)))
    assert all(row.outcome in ("baseline", "no difference shown") for row in judgement.rows)
    assert any("no interval exists" in note for note in judgement.notes)
    assert "No difference shown" in headline(judgement)


def test_one_run_alone_is_reported_without_a_comparison(tmp_path):
    judgement = judge_groups(groups_of([write_run(tmp_path / "only", "polar", diagnostics=False)]))
    assert judgement.rows[0].outcome == "not compared"
    assert headline(judgement).startswith("polar: ")


def test_each_setting_is_compared_with_the_baseline_of_the_same_setting(tmp_path):
    folders = [
        write_run(tmp_path / f"{block}-{lr}-{seed}", block, seed, diagnostics=False, changes={"optim.lr": lr})
        for block in ("standard", "polar")
        for lr in (1e-3, 3e-3)
        for seed in (1, 2)
    ]
    rows = {row.group.label: row for row in judge_groups(groups_of(folders)).rows}
    assert rows["polar · lr=0.001"].comparison.baseline == "standard · lr=0.001"
    assert rows["polar · lr=0.003"].comparison.baseline == "standard · lr=0.003"
    assert rows["standard · lr=0.003"].outcome == "baseline"


def test_variants_of_one_block_are_compared_with_its_first_or_with_a_chosen_one(tmp_path):
    folders = [
        write_run(tmp_path / f"{kernel}-{seed}", "polar", seed, diagnostics=False, changes={"block.kernel": kernel})
        for kernel in ("student", "gaussian", "exponential")
        for seed in (1, 2)
    ]
    groups = groups_of(folders)
    assert [row.outcome for row in judge_groups(groups).rows].count("baseline") == 1
    chosen = {row.group.label: row for row in judge_groups(groups, baseline="kernel=student").rows}
    assert chosen["polar · kernel=student"].outcome == "baseline"
    with pytest.raises(UserError, match=r"--baseline 'nothing'.*choose one of: polar"):
        judge_groups(groups, baseline="nothing")


def test_different_tokenizers_are_judged_in_bits_per_byte_only(tmp_path):
    folders = write_sweep(tmp_path / "a", blocks=("standard",), diagnostics=False)
    folders += write_sweep(tmp_path / "b", blocks=("polar",), diagnostics=False, tokenizer="byte")
    groups = groups_of(folders)
    judgement = judge_groups(groups, baseline="standard")
    assert not judgement.one_tokenizer
    assert any("different tokenizers" in note for note in judgement.notes)
    assert judgement.rows[1].comparison is not None
    refused = judge_groups(groups, metric="val/loss", baseline="standard")
    assert refused.rows[1].comparison is None
    assert "another tokenizer" in refused.rows[1].sentence


def test_other_data_is_not_compared(tmp_path):
    folders = [write_run(tmp_path / f"s{s}", "standard", s, diagnostics=False) for s in (1, 2)]
    folders += [
        write_run(tmp_path / f"p{s}", "polar", s, diagnostics=False, changes={"data.source": "text"}) for s in (1, 2)
    ]
    row = judge_groups(groups_of(folders), baseline="standard").rows[1]
    assert row.outcome == "not compared"
    assert "other data" in row.sentence


def test_unfinished_runs_are_not_judged_and_failed_ones_forbid_a_win(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    folders.append(write_run(tmp_path / "polar-seed4", "polar", 4, status=None, diagnostics=False))
    folders.append(write_run(tmp_path / "polar-seed5", "polar", 5, status="failed", diagnostics=False))
    judgement = judge_groups(groups_of(folders))
    polar = judgement.rows[1]
    assert sorted(seed_losses(polar.group, judgement.metric)) == [1, 2, 3, 5]
    assert polar.outcome == "no difference shown"
    assert "1 failed or diverged seed of polar" in polar.sentence
    assert any("1 failed, 1 running" in note for note in judgement.notes)


def test_a_group_without_a_finished_run_is_not_compared(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard",), diagnostics=False)
    folders.append(write_run(tmp_path / "polar", "polar", 1, status="interrupted", diagnostics=False))
    row = judge_groups(groups_of(folders)).rows[1]
    assert row.outcome == "not compared"
    assert "polar has no finished run yet" in row.sentence


def test_a_diverged_run_has_no_value_and_is_named(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    write_run(tmp_path / "polar-seed2", "polar", 2, diverged=True, diagnostics=False)
    judgement = judge_groups(groups_of(folders))
    assert judgement.metric == "test/bits_per_byte"
    assert judgement.rows[1].outcome == "no difference shown"
    assert any("Without a finite" in note and "polar-seed2" in note for note in judgement.notes)


def test_runs_without_a_test_split_or_bits_fall_back(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), seeds=(1, 2), diagnostics=False)
    for folder in folders:
        path = folder / "summary.json"
        kept = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("test/")}
        path.write_text(json.dumps(kept))
    assert judge_groups(groups_of(folders)).metric == "val/bits_per_byte"


def test_text_table_lines_up_and_ends_with_the_verdicts(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    text = text_report(judgement, width=100)
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("─"))
    assert len({len(line) for line in lines[rule - 1 : rule + 4]}) == 1
    assert "• polar: better than standard" in text
    assert final_table(judgement).rows[0][0] == "standard"


@pytest.mark.parametrize(("number", "shown"), [(None, "—"), (950, "950"), (1_184_000, "1.18 M"), (2.5e13, "25 T")])
def test_counts_are_short(number, shown):
    assert show_count(number) == shown
