"""Whether a backend gives the reference's numbers on this machine: outputs and gradients of two small calls, once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .call import AttentionOutput, RobustCall
from .noise import DirectionalNoise, RadialNoise

TOLERANCE = 1e-3  # of the largest entry of each tensor; fp32 leaves about 1e-5, a wrong kernel 1e-1
LENGTH, SIZE = 70, 32  # more than one block, and the last one not full


@dataclass(frozen=True)
class Check:
    """The verdict on one backend: `reason` is None where it can be trusted."""

    error: float | None  # largest relative difference from the reference
    seconds: float
    reason: str | None


def check(
    run: Callable[[RobustCall], AttentionOutput],
    reference: Callable[[RobustCall], AttentionOutput],
    device: torch.device | str,
) -> Check:
    """Compare a backend with the reference; draws from a generator of its own and runs outside any autograd mode."""
    began = time.perf_counter()
    # Inside a recomputed block (activation checkpointing) saved tensors are placeholders; here they are kept.
    as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), as_they_are:
        try:
            # A ν that learns and one that does not: kernels form their weights in different ways.
            error = max(
                _difference(expected, actual)
                for learned in (True, False)
                for expected, actual in zip(passes(reference, device, learned), passes(run, device, learned))
            )
        except Exception as problem:  # a compiler's, a driver's or a launcher's: they have no common base class
            return Check(None, time.perf_counter() - began, f"{type(problem).__name__}: {str(problem)[:200]}")
    wrong = None if error <= TOLERANCE else f"it differs from the reference by {error:.2g} of the largest number"
    return Check(error, time.perf_counter() - began, wrong)


def small_call(device: torch.device | str, learned: bool = True) -> RobustCall:
    """A call with every learned quantity, as blocks make them: two heads on one key head, with a magnitude.

    Unless ν is `learned`, one head has a ν of 3 and one another, and the past fades.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = low + (high - low) * torch.rand(shape, generator=generator)
        return drawn.to(device).requires_grad_()

    mu, eta_k2, eta_q2, sigma02, m_inf2 = (uniform(0.05, 0.3, 2) for _ in range(5))
    nu = uniform(2.0, 5.0, 2) if learned else torch.tensor([3.0, 4.5], device=device)
    noise = DirectionalNoise(mu, eta_k2, eta_q2, sigma02, m_inf2, nu)
    radial = RadialNoise(uniform(0.0, 0.1), uniform(0.1, 0.5), uniform(0.1, 0.5), uniform(0.1, 0.5), uniform(2.0, 5.0))
    q, k, v = draw(2, 2, LENGTH, SIZE), draw(2, 1, LENGTH, SIZE), draw(2, 1, LENGTH, SIZE)
    m = uniform(0.5, 1.5, 2, LENGTH)
    forgotten = None if learned else (-uniform(0.0, 0.5, 2, 2, LENGTH).detach().cumsum(-1)).requires_grad_()
    correlation = "qk" if learned else "vv"
    return RobustCall(
        q, k, v, noise, "student", magnitude=m, radial_mode="own", radial=radial, radial_correlation=correlation,
        forgotten=forgotten,
    )  # fmt: skip


def passes(
    run: Callable[[RobustCall], AttentionOutput], device: torch.device | str, learned: bool = True
) -> list[Tensor]:
    """Outputs and gradients of the small call: one pass forward and one back."""
    call = small_call(device, learned)
    assert call.magnitude is not None and call.radial is not None
    out = run(call)
    assert out.m_bar is not None
    outputs = [out.v_bar, out.log_evidence, out.m_bar]
    noise = [getattr(part, f.name) for part in (call.noise, call.radial) for f in fields(part)]
    leaves = [
        x for x in (call.q, call.k, call.v, call.magnitude, call.forgotten, *noise) if x is not None and x.requires_grad
    ]
    upstream = [torch.cos(torch.arange(x.numel(), device=x.device)).view_as(x) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def _difference(expected: Tensor, actual: Tensor) -> float:
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
