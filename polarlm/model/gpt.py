"""GPT: embedding, blocks around a chosen mixer, final norm, (tied) output; from tokens to logits or loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polarlm.attention.initialisation import GPT2_STD, Initialisation, linear
from polarlm.attention.mixer import KeyValueCache, Mixer, MixerShape, Record, Rotary, TokenContext
from polarlm.geometry import rotary_tables
from polarlm.model.block import FRAMES, Block, build_block, decode_layer, mixer_shape
from polarlm.model.config import GPTConfig
from polarlm.model.loss import cap_logits, chunked_cross_entropy, chunked_tally, log_probability_chunks
from polarlm.model.ngpt import Factor
from polarlm.operations import closed


class Cache:
    """One key-value cache per layer, and the rotary tables of its positions where their number is known beforehand."""

    def __init__(self, layers: list[KeyValueCache], rotary: Rotary | None = None) -> None:
        self.layers, self.rotary = layers, rotary

    @property
    def length(self) -> int:
        """Tokens already in it."""
        return self.layers[0].length


class GPT(nn.Module):
    """A decoder-only language model; `mixer` makes the attention half of every block from its MixerShape."""

    def __init__(self, config: GPTConfig, mixer: Callable[[MixerShape], Mixer]) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.frame = FRAMES[c.connection]
        # Beside a stream of unit size, what fresh blocks add is as little as nothing.
        small_branches = c.zero_init or self.frame.unit_stream
        std = embedding_std(c.vocab_size, c.d_model, c.tie_embeddings, c.init, small_branches)
        nn.init.normal_(self.embedding.weight, std=std)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(self._block(layer, mixer, std) for layer in range(c.n_layer))
        self.rotary_dim = self._blocks()[0].mixer.rotary_dim
        self._kept_rotary: tuple[Any, Rotary] | None = None
        self.norm = self.frame.final(c.d_model, c.norm_eps)
        self.head = linear(c.d_model, c.vocab_size, std)
        if c.tie_embeddings:
            self.head.weight = self.embedding.weight
        scale = c.d_model**-0.5
        self.output_scale = Factor(c.vocab_size, 1, init=1.0, scale=scale) if self.frame.output_scale else None
        self.after_step()

    def after_step(self) -> None:
        """What the frame asks of the weights after every step of an optimiser (and of fresh ones)."""
        if self.frame.after_step is not None:
            self.frame.after_step(self)

    def _block(self, layer: int, mixer: Callable[[MixerShape], Mixer], stream_std: float) -> Block:
        stream_std = 1.0 if self.frame.unit_stream else stream_std
        return build_block(self.config, mixer_shape(self.config, layer, stream_std), mixer)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def forward(self, tokens: Tensor, **context: Any) -> Tensor:
        """Logits (B, T, V) of the next token; `context` is what `hidden` takes besides the tokens."""
        return self.logits(self.hidden(tokens, **context))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of final states (…, d)."""
        return cap_logits(F.linear(hidden, self.output_weight()), self.config.logit_cap)

    def output_weight(self) -> Tensor:
        """The matrix (V, d) that makes logits of final states."""
        weight = self.head.weight
        return weight if self.output_scale is None else weight * self.output_scale().to(weight.dtype)

    def log_probabilities(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(rows, log-probabilities (n, V)) of final states (N, d), a chunk at a time, in fp32 or better."""
        return log_probability_chunks(hidden, self.output_weight(), cap=self.config.logit_cap)

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        record: list[Record] | None = None,
    ) -> Tensor:
        """The final normalised states (B, T, d); with `record`, a dict of intermediates per layer is appended to it."""
        if documents is not None and cache is not None:
            raise ValueError("documents and cache exclude each other: a cache holds one running text per row")
        if documents is not None and documents.shape != tokens.shape:
            raise ValueError(f"documents {tuple(documents.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        if self._blocks()[0].mixer.backend == "reference" and not torch.compiler.is_compiling():
            with closed():  # block.backend=reference takes nothing from polarlm/fast
                return self._hidden(tokens, documents, cache, record)
        return self._hidden(tokens, documents, cache, record)

    def _hidden(
        self, tokens: Tensor, documents: Tensor | None, cache: Cache | None, record: list[Record] | None
    ) -> Tensor:
        positions, rotary = self._where(tokens, documents, cache)
        x = self.dropout(self.frame.embed(self.embedding(tokens)))
        shared: dict[str, Tensor] = {}
        for layer, block in enumerate(self._blocks()):
            context = TokenContext(
                rotary,
                documents,
                cache.layers[layer] if cache is not None else None,
                {} if record is not None else None,
                positions,
                shared,
            )
            if self.config.checkpointing and self.training and record is None:
                x, shared = checkpoint(recomputed, block, x, context, use_reentrant=False)
            elif cache is None:
                x = block(x, context)
            else:
                x = decode_layer(block, x, context)
            if record is not None and context.record is not None:
                record.append(context.record)
        return self.norm(x)

    def _where(self, tokens: Tensor, documents: Tensor | None, cache: Cache | None) -> tuple[Tensor, Rotary]:
        """Positions of the tokens, and their rotary tables."""
        if documents is not None:
            positions = document_positions(documents)
            return positions, self._rotary(positions)
        start = cache.length if cache is not None else 0
        stop = start + tokens.shape[1]
        positions = torch.arange(start, stop, device=tokens.device)
        if cache is None:
            return positions, self._from_the_start(positions)
        if cache.rotary is None or stop > len(cache.rotary[0]):  # the layers' caches refuse the last
            return positions, self._rotary(positions)
        return positions, (cache.rotary[0][start:stop], cache.rotary[1][start:stop])

    def _from_the_start(self, positions: Tensor) -> Rotary:
        """Tables of positions 0, 1, …; kept, because most passes have the length of the one before."""
        # What is made while a graph is traced, or in inference mode, is of no use to other passes.
        if type(positions) is not Tensor or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._rotary(positions)
        key = (len(positions), positions.device, self.embedding.weight.dtype, self.rotary_dim, self.config.rope_base)
        if self._kept_rotary is None or self._kept_rotary[0] != key:
            self._kept_rotary = key, self._rotary(positions)
        return self._kept_rotary[1]

    def _rotary(self, positions: Tensor) -> Rotary:
        # Tables are in the weights' precision, but never below fp32 (float64 only in gradient checks).
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
        return rotary_tables(positions, self.rotary_dim, self.config.rope_base, dtype=dtype)

    def loss(
        self, tokens: Tensor, targets: Tensor, *, documents: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Cross-entropy in nats over targets that are not -100; reduction mean, sum or none (B, T)."""
        hidden = self.hidden(tokens, documents=documents)
        return chunked_cross_entropy(hidden, self.output_weight(), targets, reduction, cap=self.config.logit_cap)

    def tally(self, tokens: Tensor, targets: Tensor, *, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(summed loss in nats, number of targets held more likely than every other token), without gradients."""
        with torch.no_grad():
            hidden = self.hidden(tokens, documents=documents)
            return chunked_tally(hidden, self.output_weight(), targets, cap=self.config.logit_cap)

    def new_cache(self, batch: int, length: int) -> Cache:
        """An empty key-value cache for `length` tokens per row."""
        weight = self.embedding.weight
        layers = [block.mixer.new_cache(batch, length, weight.device, weight.dtype) for block in self._blocks()]
        return Cache(layers, self._rotary(torch.arange(length, device=weight.device)))

    def flops_per_token(self, context: int | None = None) -> int:
        """Training FLOPs per token: 3 x forward (backward costs two forwards), attention counted causally."""
        context = context or self.config.context
        forward = 2 * self.head.weight.numel()
        for block in self._blocks():
            forward += block.mixer.flops_per_token(context)
            forward += 2 * sum(p.numel() for p in block.feed_forward.parameters() if p.dim() > 1)
        return 3 * forward

    def parameter_count(self) -> int:
        """Trainable and frozen parameters; tied embeddings are counted once."""
        return sum(p.numel() for p in self.parameters())


def recomputed(block: Block, x: Tensor, context: TokenContext) -> tuple[Tensor, dict[str, Tensor]]:
    """(the stream after a block, what the layers share then), without changing the context that was given.

    torch.compile gives up a recomputed part that changes what lies outside of it.
    """
    context = dataclasses.replace(context, shared=dict(context.shared))
    return block(x, context), context.shared


def embedding_std(
    vocab_size: int, d_model: int, tied: bool, init: str = "width", small_branches: bool = False
) -> float:
    """Deviation of embedding and output rows: 0.02, or less where a fresh loss would exceed ln V by 2 %."""
    nats = 0.01 * math.log(max(vocab_size, 2))  # what each of two effects may cost
    # A logit of variance d std^2 costs half of it.
    std = min(GPT2_STD, (2 * nats / d_model) ** 0.5)
    if tied:
        # A tied state still holds its own token: that logit is a = d std cos and costs log(1 + (e^a - 1)/V). The blocks
        # add to every channel, so cos = std / hypot(std, added); the largest a, solved for std.
        half = math.log1p(vocab_size * math.expm1(nats)) / 2
        added = Initialisation().added_rms(d_model, 1) if init == "width" else d_model * GPT2_STD**2 / 4
        added = 0.0 if small_branches else added
        std = min(std, (2 * half * (half + math.hypot(half, d_model * added))) ** 0.5 / d_model)
    return std


def document_positions(documents: Tensor) -> Tensor:
    """Position of each token inside its document (B, T), from ids that are constant along each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(first, index, 0).cummax(dim=1).values
