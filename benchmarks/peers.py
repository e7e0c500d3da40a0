"""(d) Our `standard` against a bare torch loop written here, and against transformers' and litgpt's models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import SHAPE, VOCABULARY, build, training_step
from benchmarks.timing import interleaved
from polarlm.training.loggers.throughput import measured_peak


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


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
        q, k = (
            z * cos + torch.cat([-z[..., z.shape[-1] // 2 :], z[..., : z.shape[-1] // 2]], -1) * sin for z in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class BareGPT(nn.Module):
    """A nanoGPT-like model: embedding, blocks, tied output, plain cross-entropy."""

    def __init__(self, context: int, hidden: int, d_model: int, n_layer: int, n_head: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.blocks = nn.ModuleList(BareBlock(d_model, n_head, hidden) for _ in range(n_layer))
        self.norm = nn.RMSNorm(d_model)
        size = d_model // n_head
        angle = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _transformers(context: int, hidden: int, d_model: int, n_layer: int, n_head: int):
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=d_model,
        intermediate_size=hidden,
        num_hidden_layers=n_layer,
        num_attention_heads=n_head,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())

    return model, loss


def _litgpt(context: int, hidden: int, d_model: int, n_layer: int, n_head: int):
    try:
        from litgpt import GPT, Config
    except ImportError:
        return None
    model = GPT(
        Config(
            block_size=context,
            vocab_size=VOCABULARY,
            padded_vocab_size=VOCABULARY,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=d_model,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=hidden,
        )
    )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return model, loss


def peers(context: int, tokens: int, rounds: int) -> list[dict]:
    """Training tokens per second of each, relative to the bare loop; not installed: n/a."""
    ours = build("standard", context)
    hidden = ours.blocks[0].feed_forward.down.in_features
    bare = BareGPT(context, hidden, **SHAPE)
    candidates = {"bare torch loop": (bare, bare.loss), "polarlm standard": (ours, ours.loss)}
    candidates |= {
        "transformers Llama": _transformers(context, hidden, **SHAPE),
        "litgpt": _litgpt(context, hidden, **SHAPE),
    }
    steps = {
        name: training_step(pair[1], pair[0], tokens // context, context) for name, pair in candidates.items() if pair
    }
    seconds = interleaved(steps, rounds)
    flops, peak, base = ours.flops_per_token(context) * tokens, measured_peak(), seconds["bare torch loop"]
    rows = []
    for name in candidates:
        spent = seconds.get(name)
        row = {"model": name, "context": context, "tokens/s": None, "speed": None, "mfu": None}
        if spent:
            row |= {"tokens/s": tokens / spent, "speed": base / spent, "mfu": flops / spent / peak}
        rows.append(row)
    return rows
