"""One run from the command line: its folder, its numbers, its evaluation, its text."""

import json
import math

import pytest
import yaml
from safetensors.torch import load_file

from tests.end_to_end.conftest import numbers

pytestmark = pytest.mark.slow


def test_a_run_leaves_the_folder_that_everyone_relies_on(workshop):
    folder = workshop.folder / "runs" / "done"
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "summary.png",
        "tokenizer",
        "diagnostics",
    ):
        assert (folder / name).exists(), name
    assert (folder / "checkpoints" / "last.ckpt").exists()
    summary = workshop.summary("done")
    judged = ("val/loss", "val/perplexity", "val/bits_per_byte", "seed", "block")
    for key in (*judged, "tokens", "seconds", "tokens_per_second", "parameters", "flops_per_token"):
        assert summary.get(key) is not None, key
    assert summary["status"] == "finished"
    assert summary["tokens"] == 24 * 256
    assert summary["val/perplexity"] == pytest.approx(math.exp(summary["val/loss"]))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["choices"]["block"] == "standard" and "${" not in (folder / "config.yaml").read_text()
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]


def test_metrics_have_one_row_per_logging_step_with_step_tokens_and_seconds(workshop):
    rows = workshop.rows("done")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert {4, 8, 12, 16, 20, 24} <= set(steps)
    assert all({"step", "tokens", "seconds"} <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "val/loss" in row] == [8, 16, 24]


def test_the_final_table_names_loss_baselines_folder_picture_and_sample(workshop):
    for text in (
        "validation",
        "unigram baseline",
        "bigram baseline",
        "bits/byte",
        "parameters",
        "summary.png",
        "sample",
    ):
        assert text in workshop.first.out, workshop.first.out
    assert "step 24/24" in workshop.first.out  # quiet lines, no bar, when there is no terminal
    assert "Traceback" not in workshop.first.out and "\r" not in workshop.first.out


def test_evaluation_reproduces_the_runs_numbers_exactly_from_its_folder(workshop):
    for where in ("runs/done", "runs/done/checkpoints/last.ckpt"):
        done = workshop.run(
            "eval.py", f"checkpoint={workshop.folder}/{where}", f"cache_dir={workshop.folder}/cache", "out=again.json"
        )
        assert done.code == 0, done.out
        result = json.loads((workshop.folder / "again.json").read_text())
        assert result["val/loss"] == workshop.summary("done")["val/loss"]
        assert result["val/bits_per_byte"] == workshop.summary("done")["val/bits_per_byte"]
        assert result["protocol"]["context"] == 32


def test_generation_continues_a_prompt_and_repeats_with_its_seed(workshop):
    folder = str(workshop.folder / "runs" / "done")
    texts = []
    for seed in ("1", "1", "2"):
        done = workshop.run(
            "polarlm/__main__.py", "generate", folder, "--prompt", "the river", "--tokens", "60", "--seed", seed
        )
        assert done.code == 0, done.out
        texts.append(done.out)
    assert texts[0].startswith("the river") and len(texts[0]) > 20
    assert texts[0] == texts[1] != texts[2]


def test_the_same_seed_gives_the_same_bits_and_diagnostics_do_not_change_them(workshop):
    """Also: another logging interval for diagnostics leaves losses and weights untouched, bit for bit."""
    assert workshop.train("name=again").code == 0
    assert workshop.train("name=blind", "diagnostics=off").code == 0
    assert workshop.weights("again") == workshop.weights("done")
    assert workshop.weights("blind") == workshop.weights("done")
    assert numbers(workshop.rows("again")) == numbers(workshop.rows("done"))
    keys = ("step", "train/loss", "val/loss")
    assert [[r.get(k) for k in keys] for r in workshop.rows("blind")] == [
        [r.get(k) for k in keys] for r in workshop.rows("done")
    ]


def test_a_finished_run_is_not_overwritten(workshop):
    before = workshop.weights("done")
    done = workshop.train("name=done")
    assert done.code == 0 and "runs/done-2" in done.out
    assert workshop.weights("done") == before


def test_micro_batches_do_not_change_the_training_beyond_rounding(workshop):
    assert workshop.train("name=whole", "trainer.micro_batch_tokens=256", "model.dropout=0").code == 0
    assert workshop.train("name=parts", "trainer.micro_batch_tokens=32", "model.dropout=0").code == 0
    whole, parts = (
        load_file(workshop.folder / "runs" / n / "checkpoints" / "model.safetensors") for n in ("whole", "parts")
    )
    assert all(abs(whole[k] - parts[k]).max() < 1e-3 for k in whole)
    a, b = workshop.summary("whole")["val/loss"], workshop.summary("parts")["val/loss"]
    assert a == pytest.approx(b, abs=1e-4)
