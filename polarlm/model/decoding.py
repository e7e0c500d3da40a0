"""Decoding a whole layer in one native call, where it is the usual one: pre-norm, a decodable mixer, GELU or SwiGLU.

Everything else goes module by module, which is also what it is tested against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from polarlm.attention.decoding import token_taken
from polarlm.attention.kernels.native_decode import LayerDecoder, Matrices, takes_decoding
from polarlm.attention.mixer import TokenContext
from polarlm.attention.products import takes_products
from polarlm.model.feed_forward import GeluFeedForward, SwiGLUFeedForward
from polarlm.model.frames import PreNorm

if TYPE_CHECKING:
    from polarlm.model.block import Block

VECTOR = 16  # numbers of the widest vectors


def decode_layer(block: Block, x: Tensor, context: TokenContext) -> Tensor | None:
    """The stream after the layer for one token per row x (B, 1, d); None where it takes the long way."""
    cache = context.cache
    if cache is None or context.record is not None or not takes_decoding(x, cache) or cache.layer is False:
        return None
    if cache.layer is None:
        decoder = block.mixer.decoder(x, context)
        weights = None if decoder is None else weights_of(block, x)
        cache.layer = False if weights is None else LayerDecoder(decoder, weights, len(x))
        return decode_layer(block, x, context)
    out = cache.layer.step(x, *context.rotary, cache.length)
    token_taken(cache, cache.layer.decoder)
    return out


def weights_of(block: Block, x: Tensor) -> Matrices | None:
    """The layer's weights, if nothing but them says what it does."""
    ffn, mixer = block.feed_forward, block.mixer
    listened = any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())
    dropped = block.training and block.dropout.p > 0
    if type(block.mixer_norm) is not PreNorm or type(block.ffn_norm) is not PreNorm or listened or dropped:
        return None
    if type(ffn) is SwiGLUFeedForward:
        up, down, hidden = ffn.gate_up, ffn.down, ffn.hidden
    elif type(ffn) is GeluFeedForward:
        up, down, hidden = ffn.up, ffn.down, ffn.hidden
    else:
        return None
    projections, whole = mixer.projections(), x.shape[-1] % VECTOR == 0 and hidden % VECTOR == 0
    if not whole or not takes_products(x, *projections, mixer.out, up, down):
        return None
    return Matrices(
        norms=(block.mixer_norm.weight, block.ffn_norm.weight),
        projections=tuple(layer.weight for layer in projections),
        out=mixer.out.weight,
        up=up.weight,
        down=down.weight,
        gated=type(ffn) is SwiGLUFeedForward,
        across=(mixer.project_stream != "none", mixer.project_stream == "both"),
        eps=block.ffn_norm.eps,
        gate=None if mixer.forget is None else (mixer.forget.weight, mixer.forget.offset),
    )
