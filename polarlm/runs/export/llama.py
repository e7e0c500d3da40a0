"""The standard block is a Llama: the same weights under the names that transformers gives them, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarlm.attention import StandardAttention
from polarlm.model import GPT


def is_llama(model: GPT) -> bool:
    """Whether transformers' own Llama computes exactly this model."""
    mixers = [block.mixer for block in model.blocks]
    return (
        model.config.ffn == "swiglu"
        and model.config.frame == "pre"
        and model.config.logit_cap is None
        and all(
            type(mixer) is StandardAttention and not mixer.rotate_values and mixer.frequencies.kind == "shared"
            for mixer in mixers
        )
        and set(model.state_dict()) == set(_names(model.config.n_layer))
    )


def _names(layers: int) -> dict[str, list[str]]:
    """Our name -> theirs; several where one matrix of ours holds several of theirs, stacked."""
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    names["head.weight"] = ["lm_head.weight"]
    for n in range(layers):
        ours, theirs = f"blocks.{n}", f"model.layers.{n}"
        names |= {
            f"{ours}.mixer.qkv.weight": [f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"],
            f"{ours}.mixer.out.weight": [f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.feed_forward.gate_up.weight": [f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up")],
            f"{ours}.feed_forward.down.weight": [f"{theirs}.mlp.down_proj.weight"],
            f"{ours}.mixer_norm.weight": [f"{theirs}.input_layernorm.weight"],
            f"{ours}.ffn_norm.weight": [f"{theirs}.post_attention_layernorm.weight"],
        }
    return names


def to_llama(model: GPT) -> dict[str, Tensor]:
    """The weights under transformers' names; a tied output matrix is left out."""
    c = model.config
    heads = [count * c.head_size for count in (c.n_head, c.kv_heads, c.kv_heads)]
    weights: dict[str, Tensor] = {}
    state = model.state_dict()
    for ours, theirs in _names(c.n_layer).items():
        if ours == "head.weight" and c.tie_embeddings:
            continue
        weight = state[ours]
        parts = weight.split(heads) if len(theirs) == 3 else weight.chunk(len(theirs))
        weights |= {name: part.contiguous() for name, part in zip(theirs, parts)}
    return weights


def from_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names again; a tied output matrix stays left out."""
    layers = sum(name.endswith(".input_layernorm.weight") for name in weights)
    return {
        ours: torch.cat([weights[name] for name in theirs])
        for ours, theirs in _names(layers).items()
        if all(name in weights for name in theirs)
    }


def llama_config(model: GPT, eos_id: int | None) -> dict[str, Any]:
    """config.json of the Llama."""
    c = model.config
    hidden: Any = model.blocks[0].feed_forward
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": hidden.hidden,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }
