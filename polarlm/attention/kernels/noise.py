"""What every backend of robust attention takes and returns: the noise model per head, and the estimate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polarlm.errors import UserError

# κ̃ is capped so that a token of massive magnitude cannot turn the soft-max into an arg-max (reading.md §4.11).
MAX_QUERY_PRECISION = 1e4
# Magnitudes below this would put log m, and its gradient, out of range.
MIN_MAGNITUDE = 1e-6
RESIDUAL_FORMS = ("full", "dot")


def check_residual_form(form: str, kernel: str) -> str:
    """The residual's form, checked: `full` is ‖q−k‖², `dot` its cross term −2 q·k alone, as in ordinary attention."""
    if form not in RESIDUAL_FORMS:
        raise UserError(f"block.residual_form is {form!r}; allowed: {', '.join(RESIDUAL_FORMS)}.")
    if form == "dot" and kernel != "exponential":
        raise UserError(
            f"block.residual_form=dot is no distance, and block.kernel={kernel} needs one. "
            "Set block.kernel=exponential, or block.residual_form=full."
        )
    return form


@dataclass(frozen=True)
class DirectionalNoise:
    """Noise of the directional channel, one positive number per query head: shape (H,)."""

    mu: Tensor  # decay rate μ_h of magnitude and key noise, per token of lag
    eta_k2: Tensor  # key noise η²_{t,k}
    eta_q2: Tensor  # query noise η²_{t,q}
    sigma02: Tensor  # noise floor σ²_{t,0}
    m_inf2: Tensor  # information floor m²_∞; used only when a magnitude is given
    nu: Tensor | None = None  # Student-t degrees of freedom ν_t
    tau: Tensor | None = None  # temperature of the exponential kernel
    process2: Tensor | None = None  # RFA's σ̃² = σ²/2μ: adds the variance σ̃²(1−E²)


@dataclass(frozen=True)
class RadialNoise:
    """Noise of the radial channel, shared by all heads: tensors of shape ()."""

    mu: Tensor
    eta_k2: Tensor
    eta_q2: Tensor
    sigma02: Tensor
    nu: Tensor


@dataclass(frozen=True)
class AttentionOutput:
    """The directional estimate, its evidence, and the radial estimate where one was asked for."""

    v_bar: Tensor  # (B,H,T,Dh) Σ_j A_ij ṽ_j, still in the rotated frame
    log_evidence: Tensor  # (B,H,T) log P_attn = logsumexp_j L_ij, at least fp32
    m_bar: Tensor | None = None  # (B,T) radial estimate
    weights: Tensor | None = None  # (B,H,T,S) A, before dropout and value decay
    radial_weights: Tensor | None = None  # (B,T,S)
