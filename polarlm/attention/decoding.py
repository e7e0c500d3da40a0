"""Decoding one token at a time in one native call per layer, where the switches of a filtering block allow it.

The scalars are read when a text's first token is decoded and hold for that text: a cache outlives no change of weights.
Everything this cannot do goes through the block's ordinary pass, which is also what it is tested against.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polarlm.attention.forgetting import FORGOTTEN
from polarlm.attention.kernels import distrust
from polarlm.attention.kernels.native_decode import Decoder, Recipe, takes_decoding
from polarlm.attention.mixer import KeyValueCache, TokenContext


def decoder_for(x: Tensor, context: TokenContext, backend: str, recipe: Callable[[], Recipe | None]) -> Decoder | None:
    """The decoder that x (B, 1, d) can go through, made when a cache first needs it; None: the ordinary pass."""
    cache = context.cache
    if cache is None or context.record is not None or not takes_decoding(x, cache):
        return None
    if not cache.asked:
        wanted = recipe() if backend in ("auto", "native") and distrust("native", "cpu") is None else None
        if wanted is not None:
            cache.decoder = Decoder(wanted, cache.keys, cache.values, cache.magnitudes, cache.running.get(FORGOTTEN))
        cache.asked = True
    return cache.decoder


def decode(
    decoder: Decoder, context: TokenContext, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor | None = None
) -> Tensor:
    """What leaves the heads (B, 1, H·Dh), from the raw projections (B, 1, ·); the cache takes the token."""
    assert context.cache is not None
    out = decoder.step(q, k, v, *context.rotary, context.cache.length, log_forget)
    token_taken(context.cache, decoder)
    return out


def token_taken(cache: KeyValueCache, decoder: Decoder) -> None:
    """The cache after native code has written one token into it."""
    cache.length += 1
    if decoder.forgotten is not None:
        cache.running[FORGOTTEN] = decoder.forgotten[..., : cache.length]
