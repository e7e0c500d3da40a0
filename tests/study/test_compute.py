"""The fit of loss against compute: known laws come back, seeds give intervals, and too few sizes give nothing."""

from dataclasses import replace

import numpy as np
import pytest

from study import pictures, results
from study.compute import Setting, fit_laws, settings_of_parts
from study.judge import judge_part
from study.summaries import Summary
from tests.study.made_up import question, row, summary

LAWS = {"standard": (40.0, 0.080), "polar": (36.0, 0.078)}
FLOPS = (1e12, 1e13, 1e14, 1e15)


def rungs(noise=0.0, seeds=3, sizes=(10, 20, 30, 40)):
    random = np.random.default_rng(1)
    shared = random.normal(size=(len(FLOPS), seeds))  # a seed is good or bad for both blocks
    return [
        Setting(
            size,
            dict.fromkeys(LAWS, flops),
            {
                name: scale * flops**-exponent * np.exp(noise * (shared[i] + 0.1 * random.normal(size=seeds)))
                for name, (scale, exponent) in LAWS.items()
            },
        )
        for i, (size, flops) in enumerate(zip(sizes, FLOPS, strict=True))
    ]


def test_known_laws_come_back_with_their_gap_and_gain():
    laws = fit_laws(rungs(), draws=4)
    for name, (scale, exponent) in LAWS.items():
        assert laws.exponent[name][0] == pytest.approx(exponent) and np.exp(laws.scale[name][0]) == pytest.approx(scale)
    flops = 3e14
    reached = LAWS["polar"][0] * flops ** -LAWS["polar"][1]
    needed = (LAWS["standard"][0] / reached) ** (1 / LAWS["standard"][1])  # compute at which standard has that loss
    assert laws.gain("polar", "standard", flops)[0] == pytest.approx(needed / flops, rel=1e-6)
    expected = reached - LAWS["standard"][0] * flops ** -LAWS["standard"][1]
    assert laws.gap("polar", "standard", flops)[0] == pytest.approx(expected)


def test_the_interval_is_of_paired_seeds():
    laws = fit_laws(rungs(noise=0.05))
    gap, level = laws.gap("polar", "standard", 1e15), laws.loss("polar", 1e15)
    low, high = laws.interval(gap)
    assert low < gap[0] < high
    wide = laws.interval(level)
    assert high - low < 0.5 * (wide[1] - wide[0])  # what a seed does to both blocks is no difference between them
    again = fit_laws(rungs(noise=0.05)).gap("polar", "standard", 1e15)
    assert np.array_equal(gap, again)  # the page is made again with the same bytes


def test_single_seeds_have_no_interval_and_two_sizes_no_law():
    laws = fit_laws(rungs(seeds=1))
    assert laws.interval(laws.exponent["polar"]) is None
    assert fit_laws(rungs(sizes=(10, 20, 20, 10))) is None


def test_a_rung_counts_with_the_seeds_that_all_blocks_have():
    made, asked = summary(), question()
    made.add(row("polar", 3, float("nan"), status="failed"))
    half = {"title": "Half", "variants": asked.parts["letters"].variants, "baseline": "standard"}
    asked = question()
    asked.parts["half"] = asked.parts["letters"].__class__(**half)
    made.add(row("standard", 1, 2.0, part="half"), {"block._target_": "standard"})
    parts = {name: judge_part(asked, name, made) for name in asked.parts}
    (rung,) = settings_of_parts(parts, "standard")  # `half` has no polar yet
    assert rung.size == 1000 and rung.flops["polar"] == 6000 * 1000
    assert rung.losses["standard"] == pytest.approx([2.1, 2.2]) and len(rung.losses["polar"]) == 2


def made_answer(sizes=(1000, 4000, 16000)) -> results.Answer:
    """Rungs of these sizes, at which both blocks follow LAWS but for a seed's luck."""
    asked, made = question(), Summary("blocks")
    asked = replace(asked, fit=1e9, show="levels", parts={f"size_{n}": asked.parts["letters"] for n in sizes})
    for size in sizes:
        for seed in asked.seeds:
            for block, (scale, exponent) in LAWS.items():
                bits = scale * (6.0 * size * 1000) ** -exponent + 0.01 * seed
                changes = {"part": f"size_{size}", "parameters": size, "flops_per_token": 6 * size}
                made.add(row(block, seed, bits, **changes), {"block._target_": block})
    return results.Answer(asked, {name: judge_part(asked, name, made) for name in asked.parts}, "")


def test_the_page_says_the_laws_or_how_many_sizes_are_missing():
    text = results.section(made_answer(), {})
    assert "| setting | `standard` | `polar` |" in text and "Power laws through 3 settings of 3 sizes" in text
    assert "study/compute.svg" in text and "95 % intervals over seeds" in text
    (cells,) = [line.split("|") for line in text.splitlines() if line.startswith("| `polar` |")]
    gap = LAWS["polar"][0] * 6e6 ** -LAWS["polar"][1] - LAWS["standard"][0] * 6e6 ** -LAWS["standard"][1]
    assert float(cells[3].split("(")[0].replace("−", "-")) == pytest.approx(gap, abs=2e-3)
    beyond = LAWS["polar"][0] * 1e9 ** -LAWS["polar"][1] - LAWS["standard"][0] * 1e9 ** -LAWS["standard"][1]
    assert "extrapolated: gap at 1.0e+09 FLOPs" in text
    assert float(cells[7].split("(")[0].replace("−", "-")) == pytest.approx(beyond, abs=0.02)
    few = results.section(made_answer((1000, 4000)), {})
    assert "No law is fitted: all blocks were trained at 2 of the 3 sizes" in few and "`polar` |" in few


def test_the_compute_picture_has_a_dot_per_seed_and_the_laws():
    losses, gaps = pictures.draw_compute([made_answer()]).axes
    for axis, kind in ((losses, "loss"), (gaps, "gap")):
        dots = [line for line in axis.lines if line.get_gid() == kind]
        assert sum(len(line.get_xdata()) for line in dots) == 2 * 3 * 3
        assert len([line for line in axis.lines if len(line.get_xdata()) == 50]) == 2
    assert not pictures.draw_compute([replace(made_answer(), parts={"size_1000": None})]).axes[0].lines
