"""The table of metrics against numbers worked out by hand, and its way into every place that shows numbers."""

import math
import subprocess
import sys

import pytest

from polarlm.evaluation.metrics import (
    BY_NAME,
    METRICS,
    Tally,
    TextSize,
    formatted,
    measure,
    metric_of,
    split_metrics,
)

# 8 targets of 9 tokens at ½ each: 1 bit per token; the 9 tokens stand for 18 bytes, 12 characters, 3 words.
COIN = Tally(nats=8 * math.log(2), targets=8, correct=6, text=TextSize(tokens=9, bytes=18, characters=12, words=3))


def test_a_fair_coin_per_token_costs_what_it_must_in_every_unit():
    values = measure(COIN)
    assert values["loss"] == pytest.approx(0.6931471805599453)
    assert values["perplexity"] == pytest.approx(2.0)
    assert values["bits_per_byte"] == pytest.approx(0.5)  # one bit per token, two bytes per token: no ln 2 is left over
    assert values["word_perplexity"] == pytest.approx(2.0**3)  # three tokens per word
    assert values["character_perplexity"] == pytest.approx(2.0**0.75)
    assert values["accuracy"] == pytest.approx(0.75)


def test_bits_per_byte_is_the_size_of_an_ideal_code_for_the_text():
    # A uniform model over 256 bytes needs 8 bits for every byte.
    uniform = Tally(nats=100 * math.log(256), targets=100, text=TextSize(tokens=100, bytes=100, characters=90, words=9))
    assert measure(uniform)["bits_per_byte"] == pytest.approx(8.0)


def test_what_was_not_counted_has_no_number():
    assert "accuracy" not in measure(Tally(nats=1.0, targets=2, text=COIN.text))


def test_an_overflowing_perplexity_is_infinite_and_an_empty_text_has_no_loss():
    assert measure(Tally(nats=1e4, targets=1, text=COIN.text))["perplexity"] == math.inf
    empty = measure(Tally(nats=0.0, targets=0, correct=0, text=TextSize(0, 0, 0, 0)))
    assert all(math.isnan(value) for value in empty.values())


def test_every_row_can_be_shown_to_a_person():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.title and metric.unit and metric.description.endswith(".")
        assert metric.better in ("lower", "higher")
    assert {m.name for m in METRICS if m.better == "higher"} == {"accuracy"}


def test_the_final_table_of_a_word_model_fits_80_columns():
    from polarlm.launch.train import metric_lines

    numbers = measure(Tally(nats=8 * 5.0, targets=8, correct=6, text=COIN.text))
    summary = {f"{split}/{name}": value for split in ("val", "test") for name, value in numbers.items()}
    assert max(map(len, metric_lines({**summary, "baselines": {"unigram": numbers}}))) <= 80


def test_names_lead_back_to_the_table():
    assert metric_of("val/bits_per_byte") is BY_NAME["bits_per_byte"] is metric_of("bits_per_byte")
    assert metric_of("train/lr") is None and metric_of("radial/loss") is None
    assert split_metrics(["test/loss", "val/perplexity", "tokens", "val/loss"]) == [
        "val/loss", "val/perplexity", "test/loss",
    ]  # fmt: skip
    assert formatted("val/perplexity", 12.3456) == "12.35" and formatted("loss", None) == "–"


def test_reading_the_table_loads_nothing_heavy():
    heavy = ("torch", "numpy", "lightning")
    code = f"import polarlm.evaluation.metrics, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_new_row_reaches_the_final_table_and_wandb_without_another_edit(monkeypatch):
    from polarlm.evaluation.metrics import Metric
    from polarlm.launch import train
    from polarlm.training.loggers import wandb as wandb_module

    new = Metric(
        "nats_per_byte", "nats per byte", "nats/byte", "nats", "lower", "New.", lambda t: t.nats / t.text.bytes
    )
    for module in (train, wandb_module):
        monkeypatch.setattr(module, "METRICS", (*METRICS, new))
    lines = train.metric_lines({"val/loss": 1.0, "val/nats_per_byte": 0.25})
    assert "nats/byte" in lines[0] and "0.25" in lines[1]

    class Run:
        def __init__(self):
            self.defined = {}

        def define_metric(self, name, **options):
            self.defined[name] = options.get("summary")

    run = Run()
    wandb_module.define_axes(run)
    assert run.defined["val/nats_per_byte"] == "min" and run.defined["val/accuracy"] == "max"
