"""Steps 1 and 2 of Algorithm 1: queries, keys and values on their spheres, the magnitude, all in the common frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from polarlm.attention.additions import ValueResidual
from polarlm.attention.estimator import choice, scalar
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import TokenContext, split_heads
from polarlm.attention.parts.part import Part
from polarlm.attention.parts.transport import CommonFrame, Turns
from polarlm.attention.projections import sphere_heads
from polarlm.errors import UserError
from polarlm.geometry.sphere import on_sphere

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention


class Latent(NamedTuple):
    """What one layer makes of the stream; q, k and v are in the common frame."""

    q: Tensor  # (B, H, T, Dh)
    k: Tensor  # (B, G, T, Dh)
    v: Tensor  # (B, G, T, Dh)
    m: Tensor  # (B, T)
    frame: CommonFrame


class Inputs(Part):
    """Where the spheres are: `norm_position` before or behind the projections, `norm_scope` over all heads or each."""

    def __init__(
        self,
        block: PolarAttention,
        *,
        norm_values: bool,
        norm_position: str,
        norm_scope: str,
        norm_gain: str,
        lift: int,
        radius: float,
        value_residual: bool,
        value_weight_decay: bool,
    ) -> None:
        super().__init__(block)
        if lift not in (1, 2):
            raise UserError(
                f"block.lift is {lift}; allowed: 1 (parameter parity with standard), 2 (the paper's d -> 2d)."
            )
        self.norm_values, self.lift, self.value_residual = norm_values, lift, value_residual
        self.norm_position = choice("norm_position", norm_position, ("post", "pre", "both"))
        self.norm_scope = choice("norm_scope", norm_scope, ("global", "per_head"))
        self.norm_gain = choice("norm_gain", norm_gain, ("none", "channel"))
        self.radius, self.value_weight_decay = radius, value_weight_decay

        shape, compares = block.shape, block.parts.influence.kernel != "gaussian"
        block.lift = lift
        d, groups, size = shape.d_model, shape.n_kv_head, block.rotary_dim
        if compares:  # un-normalised q and k must come out at radius sqrt(d_h) by themselves
            std = (2 * d) ** -0.5 if norm_position == "pre" else shape.initial.hidden(d)
            block.qk = linear(d, (shape.n_head + groups) * size, std)
        # Normalised values leave their scale to m, which starts at 1 on a unit-RMS input under any convention.
        block.v = linear(d, groups * size, d**-0.5 if norm_values else shape.initial.hidden(d))
        if not value_weight_decay:  # nothing but m would drift
            block.v.optim_group = "no_decay"  # type: ignore[assignment]
        block.value_residual = ValueResidual(shape) if value_residual else None
        # One gain per channel, shared by the heads, as in QK-norm; the paper has none (|q| = |k| = r).
        gains = [nn.Parameter(torch.ones(size)) if compares and norm_gain == "channel" else None for _ in "qk"]
        block.q_gain, block.k_gain = gains
        # Only `both` gets a normalised stream; `post` needs it raw, `pre` splits off its magnitude itself.
        block.pre_norm = norm_position == "both"
        if not block.pre_norm:
            # Of a fresh model's stream where this layer reads it: embedding plus what came before.
            block.input_rms = math.hypot(shape.stream_std, shape.initial.added_rms(d, shape.layer))
        self.scalars = {"radius": scalar("radius", radius), "gain": torch.tensor(1 / block.input_rms)}

    def __call__(self, x: Tensor, p: dict[str, Tensor], context: TokenContext) -> Latent:
        """Of the stream x (B, T, d); by the operation `sphere_heads` where nothing unusual is asked for."""
        block, transport = self.block, self.block.parts.transport
        if block.qk is not None and self._usual and context.record is None:
            radius, heads = p["radius"] * 0.5**0.5, (block.shape.n_head, block.shape.n_kv_head)
            q, k, v, m = sphere_heads(x, block.qk, block.v, heads, radius, *context.rotary)
            return Latent(q, k, v, m.squeeze(-1), CommonFrame(Turns(context.rotary, context.rotary)))
        x, q, k, v, m = self._project(x, p, context)
        frame = transport(x, context)
        if context.record is not None:
            context.record.update(q=q, k=k, v=v, magnitude=m)
        if transport.rotate_values:
            q, k, v = frame.enter(q, k, v)
        else:
            q, k = frame.enter(q, k)
        return Latent(q, k, v, m, frame)

    @property
    def _usual(self) -> bool:
        """Whether the projections are normalised per head, rotated by the position, and nothing else."""
        block, transport = self.block, self.block.parts.transport
        spheres = self.norm_position == "both" and self.norm_scope == "per_head" and self.norm_values
        bare = block.q_gain is None and block.value_residual is None
        return spheres and bare and transport.by_position and transport.rotate_values

    def _project(
        self, x: Tensor, p: dict[str, Tensor], context: TokenContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The stream as the projections see it (B, T, d), q, k, v and m."""
        block = self.block
        heads, groups, size = block.shape.n_head, block.shape.n_kv_head, block.rotary_dim
        m = None
        if self.norm_position == "post":
            x = p["gain"] * x
        elif self.norm_position == "pre":  # the sphere is the stream's, and so is the magnitude: m = |z|
            m, x = on_sphere(x, 1.0)
            m = p["gain"] * m
        v = block.v(x) if block.value_residual is None else block.value_residual(block.v(x), context)
        length, direction = on_sphere(v, 1.0)
        m = length if m is None else m
        v = direction if self.norm_values else v
        v, m = split_heads(v, groups), m.squeeze(-1)
        if block.qk is None:  # the Gaussian kernel weighs by precision alone: q and k have no say
            return x, v.new_zeros(v.shape[0], heads, *v.shape[2:]), torch.zeros_like(v), v, m

        qk = block.qk(x)
        radius = p["radius"] * 0.5**0.5  # |q|^2 = s^2 d_h = s^2 Dh/2
        if self.norm_position == "pre":
            qk = qk * p["radius"].to(qk.dtype)
        elif self.norm_scope == "global":
            parts = qk.split([heads * size, groups * size], dim=-1)
            qk = torch.cat([on_sphere(part, radius)[1] for part in parts], dim=-1)
        qk = split_heads(qk, heads + groups)
        if self.norm_position != "pre" and self.norm_scope == "per_head":
            _, qk = on_sphere(qk, radius)
        q, k = qk.split([heads, groups], dim=1)
        if block.q_gain is not None and block.k_gain is not None:
            q, k = q * block.q_gain.to(q.dtype), k * block.k_gain.to(k.dtype)
        return x, q, k, v, m

    def unused(self) -> set[str]:
        """Only a raw stream needs a gain, and only normalised projections a scope."""
        return ({"gain"} if self.norm_position == "both" else set()) | (
            {"norm_scope"} if self.norm_position == "pre" else set()
        )

    def flops_per_token(self, context: int) -> int:
        """The projections."""
        return 2 * sum(layer.weight.numel() for layer in (self.block.qk, self.block.v) if layer is not None)
