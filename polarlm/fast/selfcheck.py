"""Whether a backend gives the reference's numbers on this machine: outputs and gradients of small calls, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarlm.attention.robust.call import AttentionOutput, DirectionalNoise, RadialNoise, RobustCall

# Of the largest entry of each tensor. fp32 leaves about 1e-5, bf16 operands about 1e-2; a wrong kernel 1e-1.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
LENGTH = {"cpu": 70, "cuda": 150}  # more than one block of queries and of keys, and the last one not full


class Setup(NamedTuple):
    """What decides which code a kernel is compiled to; a check of one setup says nothing about another."""

    dtype: torch.dtype = torch.float32
    size: int = 32
    group: int = 2  # query heads per key head
    kernel: str = "student"
    residual_form: str = "full"
    shape_learns: bool = True
    process: bool = False
    magnitude: bool = True
    forgets: bool = False
    packed: bool = False
    decay_keys: bool = False
    decay_values: bool = False
    radial: str | None = "qk"  # the correlation of a radial channel of its own
    constant: bool = False  # one κ for all pairs


# Every learned quantity as blocks make them; a ν that learns and one that does not form their weights in two ways.
GENERAL = (Setup(), Setup(shape_learns=False, forgets=True, radial="vv"))


def setup_of(call: RobustCall) -> tuple[Any, ...]:
    """The fields of the Setup of a call, as constants that torch.compile can hold."""
    dtype = call.q.dtype if call.q.dtype == call.k.dtype == call.v.dtype else torch.float32
    return (
        dtype, call.q.shape[3], call.q.shape[1] // call.k.shape[1], call.kernel, call.residual_form,
        call.kernel != "gaussian" and call.noise.shape(call.kernel).requires_grad, call.noise.process2 is not None,
        call.magnitude is not None, call.forgotten is not None, call.documents is not None, call.decay_keys,
        call.decay_values, call.radial_correlation if call.radial_mode == "own" else None,
        call.constant,
    )  # fmt: skip


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
    setups: Sequence[Setup] = GENERAL,
) -> Check:
    """Compare a backend with the reference; draws from a generator of its own and runs outside any autograd mode.

    Training asks for TF32 products. The reference must not use them: its own error would exceed the tolerance.
    """
    began, products = time.perf_counter(), torch.get_float32_matmul_precision()
    # Inside a recomputed block (activation checkpointing) saved tensors are placeholders; here they are kept.
    as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    errors = []
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.enable_grad(), as_they_are:
            for setup in setups:
                pairs = zip(passes(reference, device, setup), passes(run, device, setup))
                errors.append((max(_difference(*pair) for pair in pairs), setup))
    except Exception as problem:  # a compiler's, a driver's or a launcher's: they have no common base class
        return Check(None, time.perf_counter() - began, f"{type(problem).__name__}: {str(problem)[:200]}")
    finally:
        torch.set_float32_matmul_precision(products)
    wrong = [
        f"it differs from the reference by {error:.2g} of the largest number"
        for error, setup in errors
        if not error <= TOLERANCE[setup.dtype]
    ]
    return Check(max(error for error, _ in errors), time.perf_counter() - began, wrong[0] if wrong else None)


def small_call(device: torch.device | str, setup: Setup = GENERAL[0]) -> RobustCall:
    """A call of this setup with two key heads at most; of a frozen ν, one head has 3 and the others another."""
    generator = torch.Generator().manual_seed(0)
    length = LENGTH.get(torch.device(device).type, LENGTH["cpu"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, setup.dtype).requires_grad_()

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = low + (high - low) * torch.rand(shape, generator=generator)
        return drawn.to(device).requires_grad_()

    groups = 2 if setup.group == 1 else 1
    heads = groups * setup.group
    mu, eta_k2, eta_q2, sigma02, m_inf2 = (uniform(0.05, 0.3, heads) for _ in range(5))
    shape = uniform(2.0, 5.0, heads)
    if not setup.shape_learns:
        shape = torch.tensor([3.0, *[4.5] * (heads - 1)]).to(device)
    student = setup.kernel == "student"
    process2 = uniform(0.05, 0.3, heads) if setup.process else None
    named = {"nu": shape if student else None, "tau": None if student else shape, "process2": process2}
    noise = DirectionalNoise(mu, eta_k2, eta_q2, sigma02, m_inf2, **named)
    if setup.constant:
        noise = replace(noise, mu=torch.zeros_like(mu), eta_k2=torch.zeros_like(mu))
    radial = RadialNoise(uniform(0.0, 0.1), uniform(0.1, 0.5), uniform(0.1, 0.5), uniform(0.1, 0.5), uniform(2.0, 5.0))
    q, k, v = draw(2, heads, length, setup.size), *(draw(2, groups, length, setup.size) for _ in range(2))
    m = uniform(0.5, 1.5, 2, length)
    forgotten = None
    if setup.forgets:
        lost = 0.5 * torch.rand((2, heads, length), generator=generator)
        forgotten = (-lost.cumsum(-1)).to(device).requires_grad_()  # a GPU refuses it with deterministic algorithms
    return RobustCall(
        q, k, v, noise, setup.kernel,
        magnitude=m if setup.magnitude else None, residual_form=setup.residual_form,
        decay_keys=setup.decay_keys, decay_values=setup.decay_values,
        radial_mode="off" if setup.radial is None else "own", radial=None if setup.radial is None else radial,
        radial_correlation=setup.radial or "vv", forgotten=forgotten, constant=setup.constant,
        documents=(torch.arange(length, device=device) // 60).expand(2, length) if setup.packed else None,
    )  # fmt: skip


def passes(
    run: Callable[[RobustCall], AttentionOutput], device: torch.device | str, setup: Setup = GENERAL[0]
) -> list[Tensor]:
    """Outputs and gradients of the small call: one pass forward and one back."""
    call = small_call(device, setup)
    out = run(call)
    outputs = [x for x in (out.v_bar, out.log_evidence, out.m_bar) if x is not None]
    noise = [getattr(part, f.name) for part in (call.noise, call.radial) if part is not None for f in fields(part)]
    leaves = [
        x for x in (call.q, call.k, call.v, call.magnitude, call.forgotten, *noise) if x is not None and x.requires_grad
    ]
    upstream = [torch.cos(torch.arange(x.numel(), device=x.device)).view_as(x).to(x.dtype) for x in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients))
    return [x.detach() for x in outputs] + list(zeros)


def _difference(expected: Tensor, actual: Tensor) -> float:
    if not bool(actual.isfinite().all()):
        return float("inf")
    expected, actual = expected.to(torch.float32), actual.to(torch.float32)
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
