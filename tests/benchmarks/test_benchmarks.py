"""The benchmarks run at toy size: their rows have every column, and ratios refer to the first candidate."""

import pytest

from benchmarks import run
from benchmarks.blocks import BLOCKS, EXTENSIONS, attention_alone, build, extensions, whole_steps
from benchmarks.decoding import decoding
from benchmarks.neighbour import with_a_neighbour
from benchmarks.peers import candidates
from benchmarks.timing import interleaved, ratios, table

TOY = dict(d_model=32, n_layer=1, n_head=2)


def test_every_block_takes_a_training_step():
    rows = whole_steps(16, 32, 1, False, **TOY)
    assert [row["block"] for row in rows] == list(BLOCKS)
    assert rows[0]["ratio"] == 1
    assert all(row.keys() >= set(run.COLUMNS["blocks"]) for row in rows)


def test_extensions_are_relative_to_polar_and_are_the_blocks_they_are_called():
    rows = extensions(1, context=16, tokens=32, **TOY)
    assert [row["block"] for row in rows] == list(EXTENSIONS) and rows[0]["ratio"] == 1
    assert all(row.keys() >= set(run.COLUMNS["extensions"]) for row in rows)
    assert build("aggregate=complex", 16, **TOY).blocks[0].mixer.parts.aggregate.consensus == "complex"
    assert build("geonorm", 16, **TOY).config.frame == "geodesic"


def test_attention_alone_is_relative_to_sdpa():
    rows = attention_alone(16, 32, 1, heads=2, size=8)
    assert rows[0]["attention"] == "sdpa" and rows[0]["ratio"] == 1


def test_decoding_reports_tokens_per_second():
    first, second = decoding(("standard", "polar"), 20, batch=3, **TOY)
    assert first["ratio"] == 1 and second["ratio"] == pytest.approx(second["ms/token"] / first["ms/token"])
    assert second["tokens/s"] == pytest.approx(3e3 / second["ms/token"])


def test_ratios_are_of_medians_of_minima_and_within_a_round():
    ratio = ratios({"a": [1.0, 2.0, 4.0], "b": [3.0, 3.0, 4.0]}, "a")["b"]
    assert (ratio["ratio"], ratio["of minima"], ratio["in a round"]) == (1.5, 3.0, 1.5)


def test_a_neighbour_slows_a_step_down_and_is_gone_afterwards():
    (row,) = with_a_neighbour(("standard",), 16, 32, 1, **TOY)
    assert row["slowdown"] == pytest.approx(row["beside ms"] / row["alone ms"])


def test_peers_have_the_size_of_ours(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda name: None)  # slow to import, and perhaps not there
    _, sizes = candidates(16, 2, **TOY)
    assert sizes["bare torch loop"] == sizes["polarlm standard"]
    # GPT-2's feed-forward at 4d against SwiGLU's rounded hidden size; the GELU model is its equal.
    assert sizes["GPT-2 as in nanoGPT"] == sizes["polarlm standard, GELU"]


def test_candidates_take_turns():
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, warmup=1)
    assert "".join(order) == "ababab"


def test_missing_numbers_are_printed_as_not_available():
    assert "n/a" in table([{"model": "x", "speed": None}], ["model", "speed"])
