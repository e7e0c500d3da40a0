"""Random inputs for robust attention and the comparison of two backends on every output and gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polarlm.attention.robust import DirectionalNoise, RadialNoise, RobustCall, robust_attention
from polarlm.operations import open_door

open_door()  # as the first model does that a process builds


@dataclasses.dataclass
class Case:
    """Inputs of one call, all of them leaves; those that want a gradient get one."""

    q: Tensor
    k: Tensor
    v: Tensor
    magnitude: Tensor | None
    noise: DirectionalNoise
    radial: RadialNoise
    forgotten: Tensor | None = None

    def call(self, **options) -> RobustCall:
        return RobustCall(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | options)

    def each(self, change: Callable[[Tensor], Tensor]) -> Case:
        """The case with every tensor changed, e.g. moved."""

        def changed(x):
            if dataclasses.is_dataclass(x):
                return type(x)(**{name: changed(value) for name, value in vars(x).items()})
            return None if x is None else change(x.detach()).requires_grad_(x.requires_grad)

        return changed(self)

    def leaves(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "magnitude", "forgotten")}
        for part, noise in (("noise", self.noise), ("radial", self.radial)):
            tensors |= {f"{part}.{f.name}": getattr(noise, f.name) for f in dataclasses.fields(noise)}
        return {name: leaf for name, leaf in tensors.items() if leaf is not None and leaf.requires_grad}


def make_case(
    batch=2, heads=4, groups=2, queries=13, keys=None, size=8, magnitude=True, process=False, dtype=torch.float64,
    forgets=None,
) -> Case:  # fmt: skip
    """`forgets`: how many nats are forgotten at a token at most; None: no forgetting."""
    keys = keys or queries

    def on_sphere(h: int, t: int) -> Tensor:
        x = torch.nn.functional.normalize(torch.randn(batch, h, t, size, dtype=torch.float64), dim=-1)
        return (x * (size / 2) ** 0.5).to(dtype).requires_grad_()

    def positive(low: float, high: float, shape=(heads,)) -> Tensor:
        scalar = torch.float64 if dtype == torch.float64 else torch.float32
        return (low + (high - low) * torch.rand(shape, dtype=scalar)).requires_grad_()

    noise = DirectionalNoise(
        mu=positive(0.0, 0.2),
        eta_k2=positive(0.05, 0.3),
        eta_q2=positive(0.05, 0.3),
        sigma02=positive(0.02, 0.2),
        m_inf2=positive(0.005, 0.1),
        nu=positive(1.0, 6.0),
        tau=positive(0.5, 2.0),
        process2=positive(0.05, 0.3) if process else None,
    )
    radial = RadialNoise(*(positive(low, high, ()) for low, high in ((0, 0.1), (0.1, 1), (0.1, 1), (0.1, 1), (2, 5))))
    m = positive(0.3, 2.0, (batch, keys)) if magnitude else None
    forgotten = None
    if forgets is not None:
        forgotten = (-positive(0.0, forgets, (batch, heads, keys)).detach().cumsum(-1)).requires_grad_()
    qkv = on_sphere(heads, queries), on_sphere(groups, keys), on_sphere(groups, keys)
    return Case(*qkv, m, noise, radial, forgotten)


def run(case: Case, backend: str, upstream: dict[str, Tensor] | None = None, **options):
    """Outputs and the gradients of every leaf for a random but fixed upstream gradient."""
    out = robust_attention(case.call(**options), backend)
    outputs = {name: getattr(out, name) for name in ("v_bar", "log_evidence", "m_bar")}
    outputs = {name: x for name, x in outputs.items() if x is not None}
    generator = torch.Generator().manual_seed(7)
    total = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)).sum()
        for x in outputs.values()
    )
    leaves = case.leaves()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    zeros = (torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), gradients))
    return outputs, dict(zip(leaves, zeros))


def assert_same(case: Case, backend: str, tolerance: float, against: Case | None = None, **options) -> None:
    """`backend` equals the reference (of `against`, e.g. in higher precision) relative to each tensor's own scale."""
    expected = run(against or case, "reference", **options)
    actual = run(case, backend, **options)
    for expected_part, actual_part in zip(expected, actual):
        assert expected_part.keys() == actual_part.keys()
        for name, truth in expected_part.items():
            value = actual_part[name]
            assert value.isfinite().all(), f"{name} is not finite"
            error = (value.double() - truth.double()).abs().max().item()
            scale = truth.double().abs().max().item()
            assert error <= tolerance * max(scale, 1e-3), f"{name}: error {error:.3g} at scale {scale:.3g}"
