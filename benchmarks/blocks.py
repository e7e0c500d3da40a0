"""(a) Block against block: the whole training step, and attention alone against torch's own, in one run."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks.timing import interleaved, ratios, turns
from polarlm.attention.robust import DirectionalNoise, RadialNoise, RobustCall, robust_attention
from polarlm.block_keys import expanded
from polarlm.locations import CONFIGS
from polarlm.model import GPT, GPTConfig
from polarlm.training.hardware import measured_peak

# Name in the table -> (block, what differs from it).
BLOCKS: dict[str, tuple[str, list[str]]] = {
    "standard": ("standard", []),
    "xsa": ("xsa", []),
    "rfa": ("rfa", []),
    "polar": ("polar", []),
    "polar, evidence": ("polar", ["block.step.projection=evidence"]),
    "polar_paper": ("polar_paper", []),
    "polar_paper, vv": ("polar_paper", ["block.radial.radial_correlation=vv"]),
}
# Appendix G and E, and the neighbours: what `extensions` compares with polar.
EXTENSIONS: dict[str, tuple[str, list[str]]] = {
    "polar": ("polar", []),
    "standard": ("standard", []),
    "irls_steps=3": ("polar", ["block.influence.irls_steps=3"]),
    "aggregate=gate": ("polar", ["block/aggregate=gate"]),
    "aggregate=complex": ("polar", ["block/aggregate=complex"]),
    "transport=phases": ("polar", ["block/transport=phases"]),
    "transport=unitary": ("polar", ["block/transport=unitary"]),
    "precision=carried": ("polar", ["block/precision=carried"]),
    "influence=student_mle": ("polar", ["block/influence=student_mle"]),
    "precision=equilibrium": ("polar", ["block/precision=equilibrium"]),
    "step=retracted": ("polar", ["block/step=retracted", "block.step.retract=exp"]),
    "output=tied": ("polar", ["block/output=tied", "block.inputs.norm_position=post"]),
    **{name: (name, []) for name in ("alibi", "xpos", "fox", "gated", "lns", "geonorm", "ngpt")},
}
YARDSTICK = dict(d_model=128, n_layer=4, n_head=4, vocab_size=65)  # experiment=shakespeare_char_cpu
SHAPE = dict(d_model=384, n_layer=6, n_head=6)
VOCABULARY = 4096


def build(block: str, context: int, **shape) -> GPT:
    """A GPT with one of BLOCKS or EXTENSIONS, without Hydra or Lightning in between."""
    file, changes = (BLOCKS | EXTENSIONS)[block]
    hyper = _settings(file, changes)
    hyper.pop("_partial_")
    module, name = hyper.pop("_target_").rsplit(".", 1)
    frame = {"frame": hyper.pop("frame")} if "frame" in hyper else {}
    config = GPTConfig(context=context, **({"vocab_size": VOCABULARY} | SHAPE | shape | frame))
    torch.manual_seed(0)
    return GPT(config, functools.partial(getattr(importlib.import_module(module), name), **hyper))


def _settings(block: str, changes: list[str]) -> dict:
    """The block's settings as the command line makes them."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        section: Any = OmegaConf.to_container(
            compose("train", expanded([f"block={block}", *changes])).block, resolve=True
        )
    return section


def training_step(
    loss: Callable[[Tensor, Tensor], Tensor], model: nn.Module, batch: int, context: int, vocabulary: int = VOCABULARY
):
    """A closure that does one whole step: forward, backward, clipping, fused AdamW."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(vocabulary, (batch, context + 1))

    def step() -> None:
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def whole_steps(context: int, tokens: int, rounds: int, compiled: bool, blocks=tuple(BLOCKS), **shape) -> list[dict]:
    """Seconds per step of each block, ratio to the first, tokens per second and MFU; `compiled` uses torch.compile."""
    models = {name: build(name, context, **shape) for name in blocks}
    losses = {name: torch.compile(m.loss) if compiled else m.loss for name, m in models.items()}
    steps = {name: training_step(losses[name], models[name], tokens // context, context) for name in blocks}
    seconds = interleaved(steps, rounds)
    peak = measured_peak()
    return [
        {
            "block": name,
            "context": context,
            "compiled": compiled,
            "ms": 1e3 * spent,
            "ratio": spent / seconds[blocks[0]],
            "tokens/s": tokens / spent,
            "mfu": models[name].flops_per_token(context) * tokens / spent / peak,
        }
        for name, spent in seconds.items()
    ]


def extensions(rounds: int, context: int = 64, tokens: int = 768, **shape) -> list[dict]:
    """Processor time of one step of the yardstick: Appendix G, E and the neighbours relative to polar."""
    sizes = YARDSTICK | shape
    models = {name: build(name, context, **sizes) for name in EXTENSIONS}
    steps = {
        name: training_step(model.loss, model, tokens // context, context, sizes["vocab_size"])
        for name, model in models.items()
    }
    rows = ratios(turns(steps, rounds, clock=time.process_time), "polar")
    return [{"block": name, "context": context, **row} for name, row in rows.items()]


def attention_alone(context: int, tokens: int, rounds: int, heads: int = 6, size: int = 64) -> list[dict]:
    """Forward and backward of attention by itself, as a ratio to causal scaled_dot_product_attention."""
    batch = tokens // context
    q, k, v = (F.normalize(torch.randn(batch, heads, context, size), dim=-1) * (size / 2) ** 0.5 for _ in range(3))
    m = torch.rand(batch, context) + 0.5
    values = dict(mu=0.01, eta_k2=0.05, eta_q2=0.05, sigma02=0.02, m_inf2=0.01, nu=4.0, tau=1.0)
    noise = DirectionalNoise(**{name: torch.full((heads,), x).requires_grad_() for name, x in values.items()})
    radial = RadialNoise(*(torch.tensor(x).requires_grad_() for x in (0.0, 0.1, 0.1, 0.1, 4.0)))
    for x in (q, k, v, m):
        x.requires_grad_()
    upstream = torch.randn_like(q)

    def robust(magnitude: Tensor | None, **options) -> Callable[[], None]:
        def run() -> None:
            out = robust_attention(RobustCall(q, k, v, noise, magnitude=magnitude, radial=radial, **options))
            total = (out.v_bar * upstream).sum() + out.log_evidence.sum()
            (total if out.m_bar is None else total + out.m_bar.sum()).backward()

        return run

    def sdpa() -> None:
        (F.scaled_dot_product_attention(q, k, v, is_causal=True) * upstream).sum().backward()

    candidates = {
        "sdpa": sdpa,
        "student": robust(m, kernel="student"),
        "student + radial own": robust(m, kernel="student", radial_mode="own"),
        "exponential": robust(m, kernel="exponential"),
        "rfa": robust(None, kernel="student", decay_keys=True, decay_values=True),
    }
    seconds = interleaved(candidates, rounds)
    return [
        {"attention": name, "context": context, "ms": 1e3 * spent, "ratio": spent / seconds["sdpa"]}
        for name, spent in seconds.items()
    ]
