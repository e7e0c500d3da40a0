"""A polarlm model for transformers: configuration, cache, and the causal language model with `generate`.

In an exported folder this file stands beside the modules it imports and needs nothing but torch and transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from polarlm.attention.mixer import KeyValueCache
from polarlm.attention.standard import StandardAttention as BlockMixer
from polarlm.model.config import GPTConfig
from polarlm.model.gpt import GPT, Cache


class PolarlmConfig(PretrainedConfig):
    """Sizes (`gpt`) and the block's hyperparameters (`block`), with the names other programs look for beside them."""

    model_type = "polarlm"

    def __init__(self, gpt: dict[str, Any] | None = None, block: dict[str, Any] | None = None, **options: Any) -> None:
        self.gpt = gpt or {"vocab_size": 2, "context": 2, "d_model": 2, "n_layer": 1, "n_head": 1}
        self.block = block or {}
        self.vocab_size = self.gpt["vocab_size"]
        self.hidden_size = self.gpt["d_model"]
        self.num_hidden_layers = self.gpt["n_layer"]
        self.num_attention_heads = self.gpt["n_head"]
        self.max_position_embeddings = self.gpt["context"]
        self.use_cache = options.pop("use_cache", True)
        options.setdefault("tie_word_embeddings", bool(self.gpt.get("tie_embeddings", True)))
        super().__init__(**options)


class GrowingLayer(KeyValueCache):
    """One layer's cache without a fixed length."""

    def __init__(self) -> None:
        self.length = 0
        self.running = {}
        self.parts: list[Tensor | None] = [None, None, None]

    def append(
        self, keys: Tensor, values: Tensor, magnitude: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store new tokens; returns everything stored so far."""
        new = (keys, values, magnitude)
        axes = (2, 2, 1)
        self.parts = [
            x if old is None or x is None else torch.cat([old, x], axis) for old, x, axis in zip(self.parts, new, axes)
        ]
        self.length += keys.shape[2]
        return self.parts[0], self.parts[1], self.parts[2]  # type: ignore[return-value]


class PolarlmCache(Cache):
    """What `generate` carries from token to token."""

    is_compileable = False

    def __init__(self, layers: int) -> None:
        super().__init__([GrowingLayer() for _ in range(layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens already in it."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows that a beam search goes on with."""
        for layer in self.layers:
            assert isinstance(layer, GrowingLayer)
            layer.parts = [x if x is None else x.index_select(0, beam_idx.to(x.device)) for x in layer.parts]
            layer.running = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in layer.running.items()}


def _mixer(settings: dict[str, Any], shape: Any) -> Any:
    """A layer's mixer; the fast kernels are not part of an exported model."""
    mixer = BlockMixer(shape, **settings)
    if hasattr(mixer, "backend"):
        mixer.backend = "reference"
    return mixer


class PolarlmForCausalLM(PreTrainedModel, GenerationMixin):
    """The model; rows are not padded (give prompts of one length, or one at a time)."""

    config_class = PolarlmConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: PolarlmConfig) -> None:
        super().__init__(config)
        # Building checks its numbers, which the placeholders of a meta device do not have; the weights come afterwards.
        with torch.device("cpu"):
            self.model = GPT(GPTConfig(**config.gpt), partial(_mixer, config.block))
        # Loading leaves buffers that are in no file (masks of fixed zeros) as uninitialised memory: kept here, put back
        # before the first use.
        stored = self.model.state_dict()
        self._constants = {name: b.clone() for name, b in self.model.named_buffers() if name not in stored}
        self._whole = False
        self.post_init()

    def _put_constants_back(self) -> None:
        for name, buffer in self.model.named_buffers():
            if name in self._constants:
                buffer.copy_(self._constants[name])
        self._whole = True

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Every weight is in the file."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache also holds magnitudes: `forward` makes its own

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: PolarlmCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        **others: Any,
    ) -> dict[str, Any]:
        """Only the tokens that the cache does not hold yet."""
        seen = past_key_values.length if past_key_values is not None else 0
        return {
            "input_ids": input_ids[:, seen:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": 1,
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: PolarlmCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), the loss for `labels` (shifted here), and the cache."""
        if not self._whole:
            self._put_constants_back()
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("polarlm models read rows without padding; give prompts of one length, or one at a time")
        if past_key_values is None and (use_cache if use_cache is not None else self.config.use_cache):
            past_key_values = None if self.training else PolarlmCache(self.config.num_hidden_layers)
        hidden = self.model.hidden(input_ids, cache=past_key_values)
        logits = self.model.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]


PolarlmConfig.register_for_auto_class()
PolarlmForCausalLM.register_for_auto_class("AutoModelForCausalLM")
