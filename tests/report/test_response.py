"""A ladder of widths: named sizes are a varied number, and every block gets a fitted line."""

import pytest

from polarlm.report.verdict_data import verdict_data
from polarlm.runs.reading import find_run_folders, read_runs
from polarlm.verdict.groups import group_runs, varied_number
from polarlm.verdict.judgement import judge_groups
from tests.synthetic_runs import write_run


@pytest.fixture(scope="module")
def widths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("widths")
    for name, width in (("nano", 128), ("nano_256", 256), ("nano_384", 384)):
        for block in ("standard", "polar"):
            for seed in (1, 2):
                changes = {"choices.model": name, "model.d_model": width}
                place = folder / f"{block}-{name}-{seed}"
                write_run(place, block, seed, 60, diagnostics=False, changes=changes)
    return group_runs(read_runs(find_run_folders([folder])))


def test_named_sizes_are_drawn_against_their_width_with_a_line_per_block(widths):
    assert varied_number(widths) == "model.d_model"
    response = verdict_data(widths, judge_groups(widths))["response"]
    assert response["log"] and {point["x"] for point in response["points"]} == {128, 256, 384}
    assert [fit["block"] for fit in response["fits"]] == ["standard", "polar"]


def test_the_line_is_the_least_squares_fit_over_all_seeds(widths):
    response = verdict_data(widths, judge_groups(widths))["response"]
    fit = response["fits"][0]
    own = [point for point in response["points"] if widths[point["group"]].block == fit["block"]]
    assert fit["y"][1] - fit["y"][0] == pytest.approx(fit["perDoubling"])  # 128 → 256
    # A least-squares line leaves residuals that sum to nothing.
    line = dict(zip(fit["x"], fit["y"]))
    assert sum(seed - line[point["x"]] for point in own for seed in point["seeds"]) == pytest.approx(0, abs=1e-9)
