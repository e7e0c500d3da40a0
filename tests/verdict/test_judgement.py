"""From run folders to a verdict: which loss, which baseline, which runs count, and what must be said about it."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from polarlm.errors import UserError
from polarlm.locations import shipped_default
from polarlm.report.tables import results_table, show_count, text_report
from polarlm.runs.measurements import write_evaluation
from polarlm.runs.reading import find_run_folders, read_run
from polarlm.verdict.groups import follows_from_block, group_runs, varied_number
from polarlm.verdict.headline import compare_published, headline, published_sentence
from polarlm.verdict.judgement import Looks, judge_groups, seed_losses
from tests.synthetic_runs import write_run, write_sweep


def groups_of(folders):
    return group_runs([read_run(folder) for folder in folders])


def test_blocks_are_judged_on_the_test_split_with_paired_seeds(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    assert judgement.measure.name == "test/bits_per_byte"
    outcomes = {row.group.label: row.outcome for row in judgement.rows}
    assert outcomes["standard"] == "baseline"
    assert outcomes["polar"] == "better"
    polar = judgement.rows[-1]
    assert polar.comparison.seeds == (1, 2, 3)
    assert polar.comparison.family == 2
    assert "Not equal: FLOPs +22.0 %" in polar.sentence
    won, _, with_reservation = headline(judgement).partition("; ")
    assert won.startswith("polar: lower bits per byte than standard, at equal FLOPs too")
    assert with_reservation == "rfa: lower bits per byte than standard at equal tokens, not shown at equal FLOPs"


def test_one_seed_gives_no_verdict(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, seeds=(1,), diagnostics=False)))
    assert all(row.outcome in ("baseline", "no difference shown") for row in judgement.rows)
    assert any("no interval exists" in note for note in judgement.notes)
    assert headline(judgement) == "rfa and polar: no difference shown against standard"


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
    judgement = judge_groups(groups_of(folders))
    rows = {row.group.label: row for row in judgement.rows}
    assert rows["polar · lr=0.001"].comparison.baseline == "standard · lr=0.001"
    assert rows["polar · lr=0.003"].comparison.baseline == "standard · lr=0.003"
    assert rows["standard · lr=0.003"].outcome == "baseline"
    assert headline(judgement).startswith(
        "polar · lr=0.001 and polar · lr=0.003: lower bits per byte than their baselines"
    )


def test_variants_of_one_block_are_compared_with_its_first_or_with_a_chosen_one(tmp_path):
    folders = [
        write_run(tmp_path / f"{kernel}-{seed}", "polar", seed, diagnostics=False, changes={"block.kernel": kernel})
        for kernel in ("student", "gaussian", "exponential")
        for seed in (1, 2)
    ]
    groups = groups_of(folders)
    assert [row.outcome for row in judge_groups(groups).rows].count("baseline") == 1
    chosen = {row.group.label: row for row in judge_groups(groups, baseline="influence=student").rows}
    assert chosen["polar · influence=student"].outcome == "baseline"
    with pytest.raises(UserError, match=r"--baseline 'nothing'.*Choose one of: polar"):
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
    assert sorted(seed_losses(polar.group, judgement.measure)) == [1, 2, 3, 5]
    assert polar.outcome == "no difference shown"
    assert "1 failed or diverged seed of polar" in polar.sentence
    assert any("1 failed, 1 running" in note for note in judgement.notes)


def test_a_group_without_a_finished_run_is_not_compared(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard",), diagnostics=False)
    folders.append(write_run(tmp_path / "polar", "polar", 1, status="interrupted", diagnostics=False))
    judgement = judge_groups(groups_of(folders))
    row = judgement.rows[1]
    assert row.outcome == "not compared"
    assert "polar has no finished run yet" in row.sentence
    seeds, loss = results_table(judgement).rows[1][1:3]
    assert seeds == "0 of 1" and (loss.endswith("so far") or loss == "—")  # no final loss is claimed


def test_a_diverged_run_has_no_value_and_is_named(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    write_run(tmp_path / "polar-seed2", "polar", 2, diverged=True, diagnostics=False)
    judgement = judge_groups(groups_of(folders))
    assert judgement.measure.name == "test/bits_per_byte"
    assert judgement.rows[1].outcome == "no difference shown"
    assert any("Without a finite" in note and "polar-seed2" in note for note in judgement.notes)


def test_runs_without_a_test_split_or_bits_fall_back(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), seeds=(1, 2), diagnostics=False)
    for folder in folders:
        path = folder / "summary.json"
        kept = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("test/")}
        path.write_text(json.dumps(kept))
    judgement = judge_groups(groups_of(folders))
    assert judgement.measure.name == "val/bits_per_byte"
    assert "perplexity" in results_table(judgement).columns
    for folder in folders:
        path = folder / "summary.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "val/perplexity"}))
        metrics = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(metrics.replace('"val/perplexity"', '"val/unknown"'))
    # A column in which no run has a number is left out.
    assert "perplexity" not in results_table(judge_groups(groups_of(folders))).columns


def test_text_table_lines_up_and_ends_with_the_verdicts(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    text = text_report(judgement, width=100)
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("─"))
    assert len({len(line) for line in lines[rule - 1 : rule + 4]}) == 1
    assert "• polar: better than standard" in text
    assert results_table(judgement).rows[0][0] == "standard"


@pytest.mark.parametrize(("number", "shown"), [(None, "—"), (950, "950"), (1_184_000, "1.18 M"), (2.5e13, "25 T")])
def test_counts_are_short(number, shown):
    assert show_count(number) == shown


def record(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def corpus(fingerprint, kind="bpe", size=1000):
    return {"fingerprint": fingerprint, "tokenizer": {"kind": kind}, "splits": {"val": {"documents": 3, "bytes": size}}}


@pytest.mark.parametrize("wanted", ["val/losss", "val/bits-per-byte", "test/perplexitty"])
def test_an_unknown_metric_is_named_with_what_it_may_have_meant(tmp_path, wanted):
    groups = groups_of(write_sweep(tmp_path, seeds=(1, 2), diagnostics=False))
    near = {"val/losss": "val/loss", "val/bits-per-byte": "val/bits_per_byte", "test/perplexitty": "test/perplexity"}
    with pytest.raises(UserError, match=rf"--metric {wanted} is no metric. Did you mean .*{near[wanted]}"):
        judge_groups(groups, metric=wanted)


def test_a_known_metric_that_no_run_has_is_no_result_yet(tmp_path):
    groups = groups_of([write_run(tmp_path / "a", status=None, diagnostics=False)])
    with pytest.raises(UserError, match=r"--metric test/loss is in none of these runs.*These runs have: val/loss"):
        judge_groups(groups, metric="test/loss")


def test_perplexities_are_compared_by_their_logarithm(tmp_path):
    groups = groups_of(write_sweep(tmp_path, diagnostics=False))
    by_loss, by_perplexity = (judge_groups(groups, metric=f"val/{key}").rows[-1] for key in ("loss", "perplexity"))
    assert by_perplexity.comparison.difference.mean == pytest.approx(by_loss.comparison.difference.mean)
    assert "ln perplexity" in by_perplexity.sentence
    shown = by_perplexity.estimates["val/perplexity"]
    loss = judge_groups(groups, metric="val/loss").rows[-1].estimates["val/loss"]
    assert (shown.low, shown.high) == pytest.approx((math.exp(loss.low), math.exp(loss.high)))


def test_a_replaced_text_under_the_same_name_is_refused(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    for folder in folders:
        record(folder, "corpus.json", corpus("a" * 64 if "standard" in folder.name else "b" * 64))
    row = judge_groups(groups_of(folders)).rows[1]
    assert row.outcome == "not compared"
    assert "the text differs although both are called pydocs (corpus fingerprints bbbbbbbbbbbb against" in row.sentence
    for folder in folders:
        record(folder, "corpus.json", corpus("a" * 64))
    assert judge_groups(groups_of(folders)).rows[1].outcome == "better"


def test_other_tokens_of_the_same_text_have_another_fingerprint_and_are_compared_in_bits_per_byte(tmp_path):
    folders = write_sweep(tmp_path / "a", blocks=("standard",), diagnostics=False)
    folders += write_sweep(tmp_path / "b", blocks=("polar",), diagnostics=False, tokenizer="byte")
    for folder in folders:
        kind = "byte" if "polar" in folder.name else "bpe"
        record(folder, "corpus.json", corpus(kind, kind))
    assert judge_groups(groups_of(folders), baseline="standard").rows[1].role == "compared"
    for folder in folders[3:]:
        record(folder, "corpus.json", corpus("byte", "byte", size=999))
    assert "the text differs" in judge_groups(groups_of(folders), baseline="standard").rows[1].sentence


def test_other_versions_of_code_or_torch_are_said(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), seeds=(1, 2), diagnostics=False)
    for folder in folders:
        record(folder, "environment.json", {"git_commit": "c1" * 20, "versions": {"torch": "2.13.0"}})
    assert not [note for note in judge_groups(groups_of(folders)).notes if "version" in note]
    environment = {"git_commit": "d2" * 20, "git_dirty": True, "versions": {"torch": "2.6.0"}}
    record(folders[0], "environment.json", environment)
    notes = " ".join(judge_groups(groups_of(folders)).notes)
    assert "2 versions of the code (c1c1c1c1c, d2d2d2d2d)" in notes
    assert "different versions of torch (2.13.0, 2.6.0)" in notes
    assert "1 of 4 runs were made by code with uncommitted changes" in notes


def test_unequal_budgets_are_not_judged_and_say_why(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    for folder in folders[3:]:
        summary = json.loads((folder / "summary.json").read_text())
        record(folder, "summary.json", summary | {"parameters": 2 * summary["parameters"]})
    judgement = judge_groups(groups_of(folders))
    row = judgement.rows[1]
    assert row.outcome == "unequal budgets"
    assert "parameters +100.1 %, FLOPs +22.0 %" in row.sentence
    assert "match=parameters" in row.sentence
    assert row.comparison.p_adjusted is None  # no part of the family
    assert headline(judgement) == "Unequal budgets: nothing here can be judged"


def test_equal_seconds_are_the_processors_or_those_of_training_before_those_that_passed(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    # A machine that was put to sleep during the baseline's runs; polar validates more often.
    passed, training, processor = (5000, 100), (40, 44), (30, 36)
    said = {}
    for known in ((), ("training_seconds",), ("training_seconds", "processor_seconds")):
        for number, folder in enumerate(folders):
            ours = number // 3
            every = {"seconds": passed[ours], "training_seconds": training[ours], "processor_seconds": processor[ours]}
            summary = json.loads((folder / "summary.json").read_text())
            record(folder, "summary.json", summary | {k: v for k, v in every.items() if k == "seconds" or k in known})
        row = judge_groups(groups_of(folders)).rows[1]
        said[len(known)] = row.sentence
    assert ["seconds −98.0 %" in said[0], "seconds +10.0 %" in said[1], "seconds +20.0 %" in said[2]] == [True] * 3
    summary = json.loads((folders[0] / "summary.json").read_text())
    record(folders[0], "summary.json", summary | {"processor_seconds": None})  # one run had several threads
    assert "seconds +10.0 %" in judge_groups(groups_of(folders)).rows[1].sentence


def test_the_headline_does_not_deny_at_equal_tokens_what_it_says_of_equal_tokens(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)))
    polar = judgement.rows[1]
    weak = tuple(
        replace(gain, factor=replace(gain.factor, low=0.9)) for gain in polar.gains if gain.currency == "tokens"
    )
    assert weak and weak[0].outcome == "no difference shown"
    judgement.rows[1] = replace(polar, gains=weak)
    assert headline(judgement) == "polar: lower bits per byte than standard at equal tokens"


def test_head_sizes_stand_beside_every_verdict(tmp_path):
    folders = write_sweep(tmp_path / "a", blocks=("standard",), diagnostics=False)
    folders += write_sweep(tmp_path / "b", blocks=("polar",), diagnostics=False, heads=8)
    rows = judge_groups(groups_of(folders)).rows
    assert [row.head_size for row in rows] == [32, 16]
    assert "Head sizes differ: 16 against 32." in rows[1].sentence


def test_swept_numbers_sort_as_numbers_and_the_shipped_value_is_the_baseline(tmp_path):
    folders = [
        write_run(tmp_path / f"{nu}-{seed}", "polar", seed, diagnostics=False, changes={"block.nu_t": nu})
        for nu in (1000.0, 8.0, 4.0, 30.0)
        for seed in (1, 2)
    ]
    groups = groups_of(folders)
    assert [g.label.partition("=")[2] for g in groups] == ["4", "8", "30", "1000"]
    shipped = shipped_default("block.nu", {"block": "polar"})
    assert [g.is_default for g in groups] == [value == shipped for value in (4, 8, 30, 1000)]
    assert varied_number(groups) == "block.nu"
    expected = next((i for i, g in enumerate(groups) if g.is_default), 0)
    assert [row.outcome == "baseline" for row in judge_groups(groups).rows].index(True) == expected


def test_the_default_of_a_block_comes_from_the_files_it_starts_from():
    assert shipped_default("block.step.projection", {"block": "polar_paper"}) == "evidence"
    assert shipped_default("block.influence", {"block": "polar_paper"}) == "student"
    assert shipped_default("block.influence", {"block": "../../etc"}) is None


def test_a_setting_that_follows_from_the_block_is_not_in_every_label(tmp_path):
    folders = [
        write_run(tmp_path / f"{block}{seed}", block, seed, diagnostics=False, changes={"optim.lr": lr})
        for block, lr in (("standard", 1e-3), ("polar", 3e-3))
        for seed in (1, 2)
    ]
    groups = groups_of(folders)
    assert [g.label for g in groups] == ["standard", "polar"]
    assert follows_from_block(groups) == {"optim.lr": {"standard": 1e-3, "polar": 3e-3}}
    assert judge_groups(groups).rows[1].role == "compared"


LADDER = {
    "polar_constant": {"kernel": "exponential", "projection": "none", "magnitude": False},
    "polar_magnitude": {"kernel": "exponential", "projection": "none", "magnitude": True},
    "polar_student": {"kernel": "student", "projection": "none", "magnitude": True},
    "polar": {"kernel": "student", "projection": "evidence", "magnitude": True},
}


def test_the_steps_of_a_ladder_are_compared_one_by_one_and_share_the_error_rate(tmp_path):
    folders = [write_run(tmp_path / f"standard{seed}", "standard", seed, diagnostics=False) for seed in (1, 2, 3)]
    for block, settings in LADDER.items():
        changes = {f"block.{key}": value for key, value in settings.items()} | {"block._target_": "polar"}
        for seed in (1, 2, 3):
            folders.append(write_run(tmp_path / f"{block}{seed}", block, seed, diagnostics=False, changes=changes))
    judgement = judge_groups(groups_of(folders))
    climbed = [(s.comparison.baseline, s.comparison.treatment) for s in judgement.steps]
    assert climbed == list(itertools.pairwise(["standard", *LADDER]))
    # Four against the baseline and three steps; the step from the baseline is one of the four.
    assert {step.comparison.family for step in judgement.steps} == {4 + 3}
    assert [row.group.label for row in judgement.rows] == ["standard", *LADDER]


def test_seeds_added_after_a_look_are_noticed_and_planned_ones_are_not(tmp_path):
    def judged(seeds, **options):
        folders = write_sweep(tmp_path, blocks=("standard", "polar"), seeds=range(1, seeds + 1), diagnostics=False)
        groups = groups_of(folders)
        looks = Looks.beside([run for group in groups for run in group.runs])
        judgement = judge_groups(groups, looks=looks, **options)
        assert looks.record(judgement.looked) is None
        return judgement.rows[1]

    assert judged(3, planned_seeds=5).outcome == "no difference shown"
    assert not (tmp_path / ".looks.json").exists()
    assert "seeds were added" not in judged(3).sentence.lower()
    assert judged(3).comparison.looks == ()  # the same seeds again are no new look
    assert judged(4).comparison.looks == (3,)
    later = judged(5)
    assert later.comparison.looks == (3, 4)
    assert "Seeds were added after looking at 3" in later.sentence
    assert len(find_run_folders([tmp_path])) == 10  # the note is no run


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_trial_uses_the_always_valid_rule_from_its_first_look_on(tmp_path, seeds):
    groups = groups_of(write_sweep(tmp_path, blocks=("standard", "polar"), seeds=range(seeds), diagnostics=False))
    looks = Looks()
    looks.every_time = True
    first = judge_groups(groups, looks=looks).rows[1].comparison
    assert first.evidence.always_valid and first.evidence.size == seeds
    assert not judge_groups(groups).rows[1].comparison.evidence.always_valid


def test_runs_above_the_bigram_are_called_undertrained(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard",), seeds=(1, 2), diagnostics=False)
    summary = json.loads((folders[0] / "summary.json").read_text())
    record(folders[0], "summary.json", summary | {"val/loss": 5.2})
    notes = " ".join(judge_groups(groups_of(folders)).notes)
    assert "Undertrained, worse than a bigram table of the training text: standard-seed1." in notes


def test_the_headline_says_undertrained_only_where_every_run_loses_to_a_bigram_table(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    finding = headline(judge_groups(groups_of(folders)))
    said = []
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        record(folder, "summary.json", summary | {"val/loss": 5.2})
        said.append(headline(judge_groups(groups_of(folders))))
    assert said[:-1] == [finding] * (len(folders) - 1)
    assert said[-1] == f"Undertrained, every run is worse than a bigram table: {finding}"


def test_the_headline_names_the_weakest_currency(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    for row in judgement.rows[1:]:
        assert [gain.currency for gain in row.gains][-1] == "tokens"  # the synthetic blocks cost more per token
    assert re.search(
        r"than standard(, at equal \w+ too| at equal tokens, (but )?not)|every budget", headline(judgement)
    )


def test_who_wins_in_every_currency_does_not_stand_under_anothers_reservation(tmp_path):
    judgement = judge_groups(groups_of(write_sweep(tmp_path, diagnostics=False)))
    first, rfa, polar = judgement.rows
    assert (rfa.outcome, polar.outcome) == ("better", "better")
    by_all, by_one = (
        replace(gain, factor=replace(gain.factor, mean=1.2, low=low)) for low in (1.1, 0.9) for gain in [polar.gains[0]]
    )
    rows = (first, replace(rfa, gains=(by_one, by_all)), replace(polar, gains=(by_all, by_all)))
    won, _, with_reservation = headline(replace(judgement, rows=rows)).partition("; ")
    assert won.startswith("polar: lower") and "too (1.20×, 95 % interval 1.10–" in won
    assert with_reservation.startswith("rfa: lower") and "not shown at equal" in with_reservation


def test_losses_per_document_add_what_text_like_this_would_say(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 900, 50)
    hard = rng.normal(1.4, 0.1, 50)
    for folder in folders:
        gain = 0.02 * math.log(2) if "polar" in folder.name else 0.0
        nats = sizes * (hard - gain + 0.01 * rng.normal(size=50))
        protocol = {"name": "documents", "data": "pydocs", "split": "test", "corpus": "c", "context": 64, "stride": 64}
        write_evaluation(folder, {"protocol": protocol}, {"nats": nats, "bytes": sizes})
    sentence = judge_groups(groups_of(folders)).rows[1].sentence
    assert re.search(r"On text like this: −0\.0[12]\d* bits per byte .*50 documents × 3 seeds", sentence)
    assert "On text like this" not in judge_groups(groups_of(write_sweep(tmp_path / "other"))).rows[1].sentence


def test_the_mean_of_the_seeds_is_judged_against_a_published_number(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), seeds=range(1, 6), diagnostics=False)
    values = {"standard": [28.0, 28.1, 27.9, 28.05, 28.02], "polar": [27.5, 27.7, 27.4, 27.6, 27.55]}
    for folder in folders:
        block, seed = folder.name.split("-seed")
        summary = json.loads((folder / "summary.json").read_text())
        record(folder, "summary.json", summary | {"test/perplexity": values[block][int(seed) - 1]})
    groups = groups_of(folders)
    judgement = judge_groups(groups, "test/perplexity")
    standard, polar = compare_published(groups, judgement, 28.01)
    assert (standard.outcome, polar.outcome) == ("no difference shown", "better") and polar.family == 2
    # The test of scipy on the logarithms, since the mean of perplexities is that of losses.
    expected = stats.ttest_1samp(np.log(values["polar"]), np.log(28.01))
    assert polar.p_value == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval()
    assert (polar.difference.low + np.log(28.01), polar.difference.high + np.log(28.01)) == pytest.approx((low, high))
    sentence = published_sentence(polar, judgement)
    assert f"95 % interval {np.exp(low):.4g} to {np.exp(high):.4g}; 5 seeds, one-sample t" in sentence
    assert "mean 27.55" in sentence and sentence.endswith("better than the published 28.01.")
    assert compare_published(groups, judgement, 27.0)[1].outcome == "worse"
    # A failed seed forbids the claim, and so do fewer seeds than planned; adding seeds after a look costs.
    assert compare_published(groups, judgement, 28.01, planned=6)[1].outcome == "no difference shown"
    looks = Looks()
    looks.every_time = True
    assert compare_published(groups, judgement, 28.01, looks=looks)[1].p_value > polar.p_value
    summary = json.loads((folders[-1] / "summary.json").read_text())
    record(folders[-1], "summary.json", summary | {"status": "failed"})
    lost = compare_published(groups_of(folders), judgement, 28.01)[1]
    assert lost.outcome == "no difference shown" and "cannot be declared better" in published_sentence(lost, judgement)
