"""Random material for the identities: one integer seed decides everything, so hypothesis can shrink to it."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


def for_all_seeds(test: Callable) -> Callable:
    """Run a test(seed) on many draws."""
    return settings(max_examples=12, deadline=None, derandomize=True)(given(seed=st.integers(0, 2**31 - 1))(test))


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 numbers from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(seed: int, *shape: int) -> Tensor:
    """Unit vectors along the last axis."""
    x = normal(seed, *shape)
    return x / x.norm(dim=-1, keepdim=True)


def positive(seed: int, *shape: int) -> Tensor:
    """Positive numbers around one."""
    return normal(seed, *shape).mul(0.5).exp()


def weights(seed: int, *shape: int) -> Tensor:
    """Non-negative numbers that sum to one along the last axis."""
    return torch.softmax(normal(seed, *shape), dim=-1)


def order_of(error: Callable[[float], Tensor | float], steps: tuple[float, ...] = (3e-2, 1e-2, 3e-3, 1e-3)) -> float:
    """The exponent p of error(eps) ~ eps^p, by a straight line in log-log."""
    x = torch.tensor(steps, dtype=torch.float64).log()
    y = torch.tensor([float(error(eps)) for eps in steps], dtype=torch.float64).abs().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())
