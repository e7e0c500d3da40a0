"""The scalars of a filter as trainable parameters: positive, initialised exactly, frozen one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.errors import UserError
from polarlm.settings import LARGEST, SMALLEST

ZERO_SHARE = 0.25  # share of heads without decay when `mu` is spread over the heads
DECADES = 2.0  # the other heads' decay rates cover this many powers of ten below `mu`
# These divide; noises, rates and steps may be 0.
STRICTLY_POSITIVE = {"nu", "nu_t", "nu_r", "tau", "radius", "m_eq", "precision_0", "relax_a", "relax_b"}
RANGES = {"forget_bias": (-100, 100), "radius": (0.01, 100)}  # all others: what fp32 holds (settings.py)
FRACTIONS = {"prior_share", "context_power"}  # at least 0 and below 1
NOISE_SPLIT = {"k": 0.4, "q": 0.4, "0": 0.2}  # how a matched total variance divides over key, query and floor

Value = float | Sequence[float]


class Positive(nn.Module):
    """softplus(raw), initialised through its inverse; entries given as exactly 0 stay 0."""

    optim_group = "estimator"
    live: Tensor
    raw: Tensor

    def __init__(self, value: Tensor, learn: bool = True) -> None:
        super().__init__()
        self.shape = value.shape
        value = value.to(torch.float64).reshape(-1)  # stored flat: FSDP can't shard a parameter without dimensions
        self.register_buffer("live", value > 0, persistent=False)
        # softplus cannot reach 0, so an exact 0 is a mask, not a value to learn from.
        raw = torch.where(self.live, inverse_softplus(value.clamp_min(1e-12)), 0.0).float()
        if learn and bool(self.live.any()):
            self.raw = nn.Parameter(raw)
        else:
            self.register_buffer("raw", raw)

    def forward(self) -> Tensor:
        """The parameter's value, fp32 or better."""
        return positive(self.raw, self.live).reshape(self.shape)


def positive(raw: Tensor, live: Tensor) -> Tensor:
    """softplus of the live entries, 0 elsewhere, fp32 or better."""
    return torch.where(live, F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32))), 0.0)


class Estimator(nn.ModuleDict):
    """The named positive parameters of one block."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        frozen: Iterable[str],
        known: Iterable[str],
        fractions: Iterable[str] = (),
    ) -> None:
        """`fractions` names those in [0, 1): kept as odds p/(1-p), which are positive."""
        known, self.fractions = list(known), [name for name in fractions if name in values]
        values = {name: value / (1 - value) if name in self.fractions else value for name, value in values.items()}
        for name in frozen:
            if name not in known:
                raise UserError(f"block.frozen names {name!r}; this block's parameters are {', '.join(known)}.")
        frozen = set(frozen)
        super().__init__({name: Positive(value, learn=name not in frozen) for name, value in values.items()})
        self._kept: tuple[Tensor, dict[str, Tensor]] | None = None

    def read(self) -> dict[str, Tensor]:
        """Every parameter's current value; computed once per forward pass and handed on.

        Without gradients (decoding) values are kept for as long as the raw numbers stay what they were.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._read()
        raw = torch.cat([cast(Positive, p).raw for p in self.values()])
        if self._kept is None or raw.device.type != "cpu" or not torch.equal(raw, self._kept[0]):
            self._kept = raw, self._read()
        return dict(self._kept[1])

    def _read(self) -> dict[str, Tensor]:
        by_name: dict[str, Tensor] = {}
        # In two vectors: reading a dozen scalars one by one would be a good part of a small step.
        for learned in (True, False):
            chosen = {name: cast(Positive, p) for name, p in self.items()}
            chosen = {name: p for name, p in chosen.items() if p.raw.requires_grad == learned}
            if chosen:
                raw, live = torch.cat([p.raw for p in chosen.values()]), torch.cat([p.live for p in chosen.values()])
                values = positive(raw, live).split([p.raw.numel() for p in chosen.values()])
                by_name |= {name: value.reshape(p.shape) for (name, p), value in zip(chosen.items(), values)}
        for name in self.fractions:
            by_name[name] = by_name[name] / (1 + by_name[name])
        return by_name


def inverse_softplus(value: Tensor) -> Tensor:
    """x with softplus(x) = value > 0, accurate for small and large values."""
    return value + torch.log(-torch.expm1(-value))


def per_head(name: str, value: Value, heads: int) -> Tensor:
    """One number for all heads or a list with one per head -> (heads,), checked."""
    values = _numbers(name, value).flatten()
    if values.numel() not in (1, heads):
        raise UserError(f"block.{name} has {values.numel()} values; give one number, or one per head ({heads}).")
    return values.expand(heads).clone()


def scalar(name: str, value: float) -> Tensor:
    """A number shared by all heads -> (), checked."""
    number = _numbers(name, value)
    if number.dim():
        raise UserError(f"block.{name} is {value}; it is shared by all heads, so give one number.")
    return number


def refuse_noiseless(values: Mapping[str, Tensor], key_noise: str, floor: str) -> None:
    """Raise an error if a key has no noise at all: its precision would be infinite."""
    if bool(((values[key_noise] == 0) & (values[floor] == 0)).any()):
        raise UserError(
            f"block.{key_noise} and block.{floor} are both 0: infinite precision. Make one of them positive."
        )


def decay_rates(name: str, mu: Value, spread: bool, heads: int) -> Tensor:
    """Decay rate per head: as given, or (spread) a quarter of the heads exactly 0 and the rest log-spaced up to mu.

    One common rate is a bad start: heads that must look far cannot, and heads that need recency get too little. Rates
    of 0 stay 0, so some heads always see the whole context.
    """
    rates = per_head(name, mu, heads)
    if not spread or not isinstance(mu, (int, float)) or heads == 1:
        return rates
    zeros = max(1, round(ZERO_SHARE * heads))
    fraction = (
        torch.linspace(-DECADES, 0.0, heads - zeros, dtype=torch.float64) if heads - zeros > 1 else torch.zeros(1)
    )
    return torch.cat((torch.zeros(zeros, dtype=torch.float64), rates[zeros:] * 10**fraction))


def slowest_instead_of_none(rates: Tensor) -> Tensor:
    """Decay rates with the smallest positive one in place of zeros; all zero stays so."""
    positive = rates[rates > 0]
    return rates if not positive.numel() else torch.where(rates > 0, rates, positive.min())


def matched_variance(kernel: str, head_dim: int, nu: Tensor, tau: Tensor) -> Tensor:
    """Total noise variance that gives a fresh block the logit range of QK-normed dot-product attention (section 5).

    That range, from cos = 0 to cos = 1, is sqrt(Dh). With ||q||^2 = ||k||^2 = d_h the residual term at cos = 0 is
    x = 2/S: the exponential kernel gives x/tau, Student-t (nu+1)*log(1 + x/nu).
    """
    target = math.sqrt(head_dim)
    if kernel == "student_mle":  # log(1 + x/nu) is so flat that a wide head's range would need kappa beyond its cap
        x = nu * math.expm1(min(target, 5.0))
    else:
        x = nu * torch.expm1(target / (nu + 1)) if kernel == "student" else tau * target
    return 2 / x


def choice(name: str, value: str | bool, allowed: Sequence[str], also: Mapping[str, str] | None = None) -> str:
    """A switch's value, checked against what it may be; `also` maps other spellings, booleans included, to these."""
    value = (also or {}).get(str(value).lower(), str(value))
    if value not in allowed:
        raise UserError(f"block.{name} is {value!r}; allowed: {', '.join(allowed)}.")
    return value


def _numbers(name: str, value: Value) -> Tensor:
    try:
        values = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(f"block.{name} is {value!r}; it must be a number, or a list of numbers.") from None
    if name in FRACTIONS and not bool((values < 1).all()):
        raise UserError(f"block.{name} is {values.tolist()}; it must be at least 0 and below 1.")
    lowest, highest = RANGES.get(name, (SMALLEST if name in STRICTLY_POSITIVE else 0, LARGEST))
    if not bool(((values >= lowest) & (values <= highest)).all()):
        kind = "finite and positive" if lowest == SMALLEST else "finite"
        raise UserError(
            f"block.{name} is {values.tolist()}; it must be {kind}, at least {lowest:g} and at most {highest:g}."
        )
    return values
