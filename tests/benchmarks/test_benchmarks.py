"""The benchmarks run at toy size: their rows have every column, and ratios refer to the first candidate."""

import pytest

from benchmarks import run
from benchmarks.blocks import BLOCKS, attention_alone, whole_steps
from benchmarks.decoding import decoding
from benchmarks.timing import interleaved, table

TOY = dict(d_model=32, n_layer=1, n_head=2)


def test_every_block_takes_a_training_step():
    rows = whole_steps(16, 32, 1, False, **TOY)
    assert [row["block"] for row in rows] == list(BLOCKS)
    assert rows[0]["ratio"] == 1
    assert all(row.keys() >= set(run.COLUMNS["blocks"]) for row in rows)


def test_attention_alone_is_relative_to_sdpa():
    rows = attention_alone(16, 32, 1, heads=2, size=8)
    assert rows[0]["attention"] == "sdpa" and rows[0]["ratio"] == 1


def test_decoding_reports_tokens_per_second():
    (row,) = decoding(("polar",), 20, **TOY)
    assert row["tokens/s"] == pytest.approx(20 / row["seconds"])


def test_candidates_take_turns():
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, warmup=1)
    assert "".join(order) == "ababab"


def test_missing_numbers_are_printed_as_not_available():
    assert "n/a" in table([{"model": "x", "speed": None}], ["model", "speed"])
