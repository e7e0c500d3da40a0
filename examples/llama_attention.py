"""Polar attention inside a Hugging Face Llama: replaces every attention layer and keeps the rest of the model.

python examples/llama_attention.py      # a tiny Llama with random weights learns to repeat a text; no download
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from polarlm import PolarSelfAttention


class PolarLlamaAttention(nn.Module):
    """Replaces LlamaAttention; it encodes positions itself, so Llama's own rotary tables are not used."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.polar = PolarSelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            n_kv_head=config.num_key_value_heads,
            n_layer=config.num_hidden_layers,
            dropout=config.attention_dropout,
        )

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """(what is added to the stream, no weights); pass use_cache=False, Llama's cache is not filled."""
        if past_key_values is not None:
            raise ValueError("past_key_values is not supported; call the model with use_cache=False")
        if attention_mask is not None:  # attention is causal already, so a mask means padding
            raise ValueError("attention_mask is not supported; give texts of one length, without padding")
        return self.polar(hidden_states), None


def exchange_attention(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model with polar attention in every layer, in place; the new layers are untrained."""
    for layer in model.model.layers:
        layer.self_attn = PolarLlamaAttention(model.config).to(layer.self_attn.o_proj.weight)
    model.config.use_cache = model.generation_config.use_cache = False
    return model


def main(steps: int = 30) -> list[float]:
    """Losses of a few steps on one sentence."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = exchange_attention(LlamaForCausalLM(config))
    tokens = torch.tensor([list(b"Attention weighs directions; magnitude says how sure a token is.")])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} steps")
    return losses


if __name__ == "__main__":
    main()
