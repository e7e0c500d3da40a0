"""`polarlm inspect --plan`: the numbers a person plans with, and one sentence for a wrong one."""

from __future__ import annotations

import re

import pytest

from polarlm.cli import main
from polarlm.launch.inspect import plan_text

SMALL = ["model=nano", "model.d_model=32", "model.n_layer=2", "model.context=32", "trainer.batch_tokens=16384"]


@pytest.fixture(scope="module")
def text() -> str:
    return plan_text(["gpus=512", "gpu=h100", *SMALL, "trainer.strategy=fsdp", "trainer.max_steps=10"])


def test_a_plan_for_512_gpus(text):
    assert "512 × H100 SXM in 64 nodes: fsdp, bf16-mixed" in text
    assert "16,384 tokens = 512 GPUs × 1 micro-batches × 1 windows of 32; 10 steps" in text
    assert "network, 50 GB/s" in text and "fsdp *" in text
    for line in ("weights", "gradients", "optimiser", "activations", "logits, workspace", "peak"):
        assert re.search(rf"^  {line} +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE), line


def test_time_follows_from_counted_flops_and_the_published_peak(text):
    flops = int(re.search(r"FLOPs per token \(counted\) +([\d,]+)", text)[1].replace(",", ""))
    best = float(re.search(r"tokens per second.* ([\d,]+)$", text, re.MULTILINE)[1].replace(",", ""))
    sending = float(re.search(r"fsdp +[\d.e-]+ GB +([\d.e-]+) ms", text)[1]) / 1e3
    computing = 16_384 * flops / 512 / (0.4 * 989.4e12)
    assert best == pytest.approx(16_384 / max(computing, sending), rel=0.02)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("gpu=h101 gpus=8", ["h101", "h100", "a100"]),
        ("gpus=8", ["gpu=", "h100"]),
        ("gpu=h100", ["gpus="]),
        ("gpu=h100 gpus=0", ["gpus=0", "≥ 1"]),
        ("gpu=h100 gpus=eight", ["gpus='eight'"]),
        ("gpu=h100 gpus=8 mfu=2", ["mfu=2"]),
        ("gpu=h100 gpus=12", ["12", "per_node=8"]),
        ("gpu=h100 gpus=8 trainer.batch_tokens=1000", ["trainer.batch_tokens=1000"]),
        ("gpu=h100 gpus=8 modle=tiny", ["modle", "model"]),
        ("gpu=v100 gpus=8 trainer.precision=bf16-mixed", ["bf16", "V100"]),
        ("gpu=h100 gpus=8 tokenizer=char", ["vocab="]),
    ],
)
def test_a_wrong_plan_is_one_sentence(capsys, typed, words):
    assert main(["inspect", "--plan", *typed.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    for word in words:
        assert word in captured.err


def test_inspect_takes_a_run_or_a_plan(capsys):
    assert main(["inspect"]) == 2
    assert "--plan" in capsys.readouterr().err
