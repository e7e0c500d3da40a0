"""The size of a model, checked; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.errors import UserError
from polarlm.settings import setting

CONNECTIONS = ("pre", "post", "scaled", "geodesic", "ngpt")  # polarlm/model/block.py
# Behind a +: which branches add only what is orthogonal to the stream, attention or the feed-forward too.
FRAME_NAMES = tuple(name + suffix for suffix in ("", "+tangent", "+tangent_both") for name in CONNECTIONS)


@dataclass(frozen=True)
class GPTConfig:
    """The size of a model, in plain values; what stands in its blocks is chosen separately."""

    # The upper bounds are far above any model; they keep a slip of the keyboard from asking for terabytes.
    vocab_size: int = setting(at_least=1)
    context: int = setting(at_least=1, at_most=2**22)
    d_model: int = setting(at_least=1, at_most=2**17)
    n_layer: int = setting(at_least=1, at_most=2**10)
    n_head: int = setting(at_least=1, at_most=2**12)
    n_kv_head: int | None = setting(None, at_least=1)  # fewer than n_head: grouped-query attention
    head_dim: int | None = setting(None, at_least=1, at_most=2**17)  # d_model / n_head when not given
    ffn: str = setting("swiglu", choices=("swiglu", "gelu", "relu2", "none"))
    # Hidden size in units of d_model, as for GELU; SwiGLU takes 2/3 of it (equal parameters).
    ffn_mult: float = setting(4.0, above=0, at_most=2**10)
    ffn_width: int | None = setting(None, at_least=1, at_most=2**24)  # the hidden size itself, instead of ffn_mult
    tie_embeddings: bool = True
    dropout: float = setting(0.0, at_least=0, below=1)
    rope_base: float = setting(10000.0, above=1, at_most=10**12)
    norm_eps: float = setting(1e-6, at_least=1e-20, at_most=1)
    # Deviation of fresh matrices: width (1/sqrt of the inputs) | gpt2 (0.02).
    init: str = setting("width", choices=("width", "gpt2"))
    zero_init: bool = False  # maps that add to the stream (attention output, feed-forward down) start at zero
    logit_cap: float | None = setting(None, at_least=0.1, at_most=10**6)  # c: logits are c tanh(logits / c)
    # The residual frame: pre (normalised before each branch) | post (after each addition) | scaled (pre, deeper layers
    # read less) | geodesic (steps along a sphere) | ngpt (everything on spheres); pre+tangent, …: attention adds only
    # what is orthogonal to the stream; pre+tangent_both: the feed-forward too.
    frame: str = setting("pre", choices=FRAME_NAMES)
    checkpointing: bool = False  # recompute each block in the backward pass instead of storing it

    def __post_init__(self) -> None:
        for key in ("vocab_size", "context", "d_model", "n_layer", "n_head", "n_kv_head", "head_dim"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"model.{key} is {value}; it must be at least 1.")
        if self.head_dim is None and self.d_model % self.n_head:
            raise UserError(
                f"model.n_head={self.n_head} does not divide model.d_model={self.d_model}; choose a divisor of "
                f"{self.d_model} ({_divisors(self.d_model)}) or set model.head_dim."
            )
        if self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}; "
                f"choose one of {_divisors(self.n_head)}."
            )
        if self.head_size % 2:
            raise UserError(
                f"the head size {self.head_size} (model.head_dim, or d_model/n_head = {self.d_model}/{self.n_head}) is "
                "odd; rotary positions turn pairs of channels, so choose an even one."
            )
        for key, allowed in (("init", ("width", "gpt2")), ("frame", FRAME_NAMES)):
            if getattr(self, key) not in allowed:
                raise UserError(f"model.{key} is {getattr(self, key)!r}; allowed: {', '.join(allowed)}.")
        if self.connection == "ngpt" and self.zero_init:
            raise UserError(
                "model.zero_init=true contradicts the frame ngpt, whose matrices have rows or columns of length 1; set "
                "model.zero_init=false."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be in [0, 1).")
        share = self.ffn_mult * (2 / 3 if self.ffn == "swiglu" else 1)
        if self.ffn != "none" and self.ffn_width is None and share * self.d_model < 1:
            raise UserError(
                f"model.ffn_mult={self.ffn_mult} leaves less than one hidden channel of model.d_model={self.d_model}; "
                "choose a larger one, or model.ffn=none."
            )

    def channels_per_layer(self) -> int:
        """Channels that every token has in a layer: queries, keys, values and the hidden ones of the feed-forward."""
        hidden = self.ffn_width or int(self.ffn_mult * self.d_model * (2 / 3 if self.ffn == "swiglu" else 1))
        wide = {"none": 0, "swiglu": 2}.get(self.ffn, 1)
        return (self.n_head + 2 * self.kv_heads) * self.head_size + wide * hidden

    def least_parameters(self) -> int:
        """A lower bound of the parameters, whatever the block, from the sizes alone."""
        return self.d_model * (self.vocab_size + self.n_layer * self.channels_per_layer())

    @property
    def connection(self) -> str:
        """The frame's name without its projections."""
        return self.frame.partition("+")[0]

    @property
    def tangent(self) -> tuple[bool, bool]:
        """Whether what attention, and what the feed-forward adds is projected off the stream."""
        suffix = self.frame.partition("+")[2]
        return suffix != "", suffix == "tangent_both"

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.head_dim or self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_head or self.n_head


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
