"""docs/gpu.md: hours follow from instructions counted in the compiled kernels, micro-batches from counted memory."""

from __future__ import annotations

import os
import re

import pytest

from polarlm.launch.accept import configuration
from polarlm.training.batching import fitting_tokens
from polarlm.training.gpus import GPUS, TERA
from polarlm.training.plan import untouched_model
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
# Processors (SM) and clock in GHz: NVIDIA's data sheets.
ISSUES = {"A100": ("a100", 108, 1.41), "H100": ("h100", 132, 1.755), "RTX 4090": ("rtx4090", 128, 2.52)}
SIZES = {  # tokens, part of the peak that products reach, room for the tiles on the diagonal
    "wikitext103_19m": (1.76e9, 0.25, 1.30),
    "gpt2_124m": (1e10, 0.50, 1.15),
}
SLOWER_THAN_ISSUING, PLAIN = 1.95, 4.0  # over the bound; ps per pair of FlashAttention-2 on an H100


def hours(experiment: str, block: str, card: str, per_pair: float) -> float:
    """Of one run: attention by its instructions, every other product by its FLOPs."""
    gpu, processors, clock = ISSUES[card]
    tokens, share, diagonal = SIZES[experiment]
    config = configuration(f"experiment={experiment}", f"block={block}")
    model, shape = untouched_model(config, 50257), config["model"]
    pairs = shape["n_layer"] * shape["n_head"] * shape["context"] / 2  # of a token
    per_ps = processors * 128 * clock * 1e-3
    picoseconds = SLOWER_THAN_ISSUING * diagonal * per_pair / per_ps if block == "polar" else PLAIN * 29.7 / per_ps
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1) + model.head.weight.numel()
    products = 6 * matrices / (share * GPUS[gpu].half * TERA)
    return tokens * (products + pairs * picoseconds * 1e-12) / 3600


@pytest.mark.parametrize("experiment", SIZES)
def test_the_hours_follow_from_the_counted_instructions(experiment):
    said = re.search(
        r"`polar` ([\d.]+) forward, ([\d.]+) for queries and parameters, ([\d.]+) for keys and values",
        " ".join(PAGE.split()),
    )
    assert said is not None
    per_pair = sum(map(float, said.groups()))
    rows = re.findall(r"^\|(?: `(\w+)`)? \|[^|]*\| `(\w+)` \| ([\d.]+) h \| ([\d.]+) h \| ([\d.]+) h \|$", PAGE, re.M)
    named, table = "", {}
    for name, block, *numbers in rows:
        named = name or named
        table[named, block] = [float(number) for number in numbers]
    for block in ("standard_strong", "polar"):
        computed = [hours(experiment, block, card, per_pair) for card in ISSUES]
        assert table[experiment, block] == pytest.approx(computed, rel=0.01, abs=0.005)


@pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="counts six steps of 124 M: POLARLM_NIGHTLY=1")
def test_the_search_for_a_micro_batch_begins_where_the_page_says():
    rows = re.findall(r"^\| (\d+) GB \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.M)
    assert [int(row[0]) for row in rows] == [8, 24, 80]
    begins = {}
    for column, block, more in ((1, "polar", "false"), (2, "standard_strong", "false"), (3, "polar", "true")):
        switches = (f"block={block}", f"model.checkpointing={more}", "trainer.micro_batch_tokens=auto")
        config = configuration("experiment=gpt2_124m", *switches)
        memories = [int(row[0]) * 1e9 for row in rows]
        begins[column] = [next(fitting_tokens(config, 50257, "bf16-mixed", 1, memory)) for memory in memories]
    assert begins == {column: [int(row[column].replace(",", "")) for row in rows] for column in (1, 2, 3)}
