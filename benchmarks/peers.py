"""(d) Our `standard` against models written here (a bare Llama, a GPT-2 as nanoGPT has it), transformers and litgpt."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import SHAPE, VOCABULARY, build, training_step
from benchmarks.timing import interleaved
from polarlm.training.hardware import measured_peak

OURS, OURS_GELU, NANOGPT = "polarlm standard", "polarlm standard, GELU", "GPT-2 as in nanoGPT"
NANOGPT_ROTARY = f"{NANOGPT}, rotary"
LIKE_GELU = (OURS_GELU, NANOGPT, NANOGPT_ROTARY)  # compared with our GELU model, the others with the SwiGLU one


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as a tutorial has it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def tables(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Its cosines and sines (context, size)."""
    angle = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
    return angle.cos(), angle.sin()


class BareBlock(nn.Module):
    """RMSNorm, RoPE attention, SwiGLU: as few lines as a tutorial would need."""

    def __init__(self, d: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * hidden, bias=False), nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (rotated(z, cos, sin) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class BareGPT(nn.Module):
    """A Llama as a tutorial has it: embedding, blocks, tied output, plain cross-entropy."""

    def __init__(
        self, context: int, hidden: int, d_model: int, n_layer: int, n_head: int, vocab_size: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(BareBlock(d_model, n_head, hidden) for _ in range(n_layer))
        self.norm = nn.RMSNorm(d_model)
        self.turns = tables(context, d_model // n_head)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *self.turns)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT2Block(nn.Module):
    """LayerNorm, attention, GELU."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, dim=2))
        if turns is not None:
            q, k = rotated(q, *turns), rotated(k, *turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2Like(nn.Module):
    """The model that nanoGPT trains: GPT-2 without biases, learned positions, tied output, plain cross-entropy."""

    rotary = False

    def __init__(self, context: int, d_model: int, n_layer: int, n_head: int, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = None if self.rotary else nn.Embedding(context, d_model)
        self.turns = tables(context, d_model // n_head) if self.rotary else None
        self.blocks = nn.ModuleList(GPT2Block(d_model, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model, bias=False)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.turns)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RotaryGPT2Like(GPT2Like):
    """The same with our positions, put in as a tutorial would."""

    rotary = True


def _with_loss(model: nn.Module, logits: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable]:
    """A stranger's model, and the plain cross-entropy of its logits."""
    return model, lambda tokens, targets: F.cross_entropy(logits(tokens).flatten(0, 1), targets.flatten())


def _transformers(context: int, hidden: int, d_model: int, n_layer: int, n_head: int, vocab_size: int = VOCABULARY):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=d_model, intermediate_size=hidden, num_hidden_layers=n_layer, num_attention_heads=n_head,
        vocab_size=vocab_size, max_position_embeddings=context, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    return _with_loss(model, lambda tokens: model(tokens).logits)


def _litgpt(context: int, hidden: int, d_model: int, n_layer: int, n_head: int, vocab_size: int = VOCABULARY):
    from litgpt import GPT, Config

    config = Config(
        n_embd=d_model, intermediate_size=hidden, n_layer=n_layer, n_head=n_head,
        vocab_size=vocab_size, padded_vocab_size=vocab_size, block_size=context, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", rotary_percentage=1.0, parallel_residual=False,
    )  # fmt: skip
    model = GPT(config)
    return _with_loss(model, model)


def candidates(context: int, batch: int, **shape: int) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """A training step of every model that is installed, and its parameters without embeddings; ours first."""
    shape = SHAPE | shape
    vocabulary = shape.get("vocab_size", VOCABULARY)
    ours, gelu = build("standard", context, **shape), build("standard", context, **shape, ffn="gelu")
    first: Any = ours.blocks[0]
    hidden = first.feed_forward.down.in_features
    bare, gpt2 = BareGPT(context, hidden, **shape), GPT2Like(context, **shape)
    turned = RotaryGPT2Like(context, **shape)
    made = {
        OURS: (ours, ours.loss),
        OURS_GELU: (gelu, gelu.loss),
        "bare torch loop": (bare, bare.loss),
        NANOGPT: (gpt2, gpt2.loss),
        NANOGPT_ROTARY: (turned, turned.loss),
    }
    if find_spec("transformers"):
        made["transformers Llama"] = _transformers(context, hidden, **shape)
    if find_spec("litgpt"):
        made["litgpt"] = _litgpt(context, hidden, **shape)
    steps = {name: training_step(loss, model, batch, context, vocabulary) for name, (model, loss) in made.items()}
    sizes = {
        name: sum(p.numel() for p in model.parameters())
        - sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
        for name, (model, _) in made.items()
    }
    return steps, sizes


def peers(context: int, tokens: int, rounds: int, **shape: int) -> list[dict]:
    """Training tokens per second of each, and our speed relative to it, like feed-forward against like."""
    steps, sizes = candidates(context, tokens // context, **shape)
    spent = interleaved(steps, rounds)
    flops, peak = build("standard", context, **shape).flops_per_token(context) * tokens, measured_peak()
    return [
        {
            "model": name,
            "context": context,
            "parameters": sizes[name],
            "tokens/s": tokens / seconds,
            "ours": seconds / spent[OURS_GELU if name in LIKE_GELU else OURS],
            "mfu": flops / seconds / peak,
        }
        for name, seconds in spent.items()
    ]
