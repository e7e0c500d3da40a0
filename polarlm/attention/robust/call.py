"""What every backend of robust attention takes and returns: the noise model, one description of a call, the estimate.

Shapes: B batch, H query heads, G key/value heads (G divides H), T queries, S keys (the queries are the last T of the
S positions), Dh real head size, d_h = Dh/2 complex modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KERNELS = ("student", "exponential", "gaussian")  # of every backend, in the order in which native code numbers them
PLAIN_KERNELS = (*KERNELS, "student_mle")  # of plain torch
RADIAL_MODES = ("off", "own", "shared")
RADIAL_CORRELATIONS = ("vv", "qk", "one")
RESIDUAL_FORMS = ("full", "dot")
CONSENSUS = ("none", "gate", "complex")
NO_WEIGHTS = "it never holds the weights that were asked for"  # of every backend but the reference


# Rows of the noise as operators take it, (7, H); the last is the kernel's own parameter, ν or τ.
NOISE_ROWS = ("mu", "eta_k2", "eta_q2", "sigma02", "m_inf2", "process2", "shape")
RADIAL_ROWS = ("mu", "eta_k2", "eta_q2", "sigma02", "nu")  # and of the radial channel's, (5,)


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

    @classmethod
    def of(cls, p: Mapping[str, Tensor]) -> DirectionalNoise:
        """From a polar block's deviations; scalars that it does not have are 0."""
        return cls(
            mu=p["mu"],
            eta_k2=p["eta_tk"].square(),
            eta_q2=p["eta_tq"].square() if "eta_tq" in p else torch.zeros_like(p["mu"]),
            sigma02=p["sigma_t0"].square(),
            m_inf2=p["m_inf"].square().expand_as(p["mu"]),
            nu=p.get("nu_t"),
            tau=p.get("tau"),
        )

    def shape(self, kernel: str) -> Tensor:
        """The kernel's own parameter (H,): ν of Student-t, τ of exponential, 1 of gaussian, which has none."""
        shape = {"exponential": self.tau, "gaussian": torch.ones_like(self.mu)}.get(kernel, self.nu)
        assert shape is not None, "RobustCall.check sees to it"
        return shape

    def rows(self, kernel: str, dtype: torch.dtype) -> Tensor:
        """Everything as one tensor (7, H) in the order of NOISE_ROWS; no process noise is a row of zeros."""
        process2 = torch.zeros_like(self.mu) if self.process2 is None else self.process2
        named = vars(self) | {"process2": process2, "shape": self.shape(kernel)}
        return torch.stack([named[name] for name in NOISE_ROWS]).to(dtype)


@dataclass(frozen=True)
class RadialNoise:
    """Noise of the radial channel, shared by all heads: tensors of shape ()."""

    mu: Tensor
    eta_k2: Tensor
    eta_q2: Tensor
    sigma02: Tensor
    nu: Tensor

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Everything as one tensor (5,) in the order of RADIAL_ROWS."""
        return torch.stack([getattr(self, name) for name in RADIAL_ROWS]).to(dtype)


@dataclass(frozen=True)
class RobustCall:
    """Causal robust attention of q over k and v, with all it depends on.

    Scores are formed in fp32 (fp64 for fp64 inputs) also under autocast. `documents` holds ids that attention must not
    cross. `dropout` acts on the weights and leaves the log-evidence alone.
    """

    q: Tensor  # (B,H,T,Dh), in the rotated frame like k and v
    k: Tensor  # (B,G,S,Dh)
    v: Tensor  # (B,G,S,Dh)
    noise: DirectionalNoise
    kernel: str
    magnitude: Tensor | None = None  # (B,S); None makes the numerator of κ one (RFA)
    residual_form: str = "full"  # full is ‖q−k‖², dot its cross term −2 q·k alone, as in ordinary attention
    decay_keys: bool = False  # ‖q−Ek‖² instead of ‖q−k‖²
    decay_values: bool = False  # Σ A E v instead of Σ A v
    radial_mode: str = "off"  # own: weights of the radial likelihood; shared: the directional ones, averaged over heads
    radial: RadialNoise | None = None
    # c_ij of the radial channel: vv is ⟨v_i,v_j⟩/D; qk is Σ_h⟨q_h,k_h⟩/‖q‖‖k‖, the paper's; one is 1, its small angles
    radial_correlation: str = "vv"
    equilibrium: Tensor | None = None  # (): magnitudes flow towards it instead of decaying
    # Appendix G.1 (needs the radial noise): gate is the real correlation's, complex the complex one's; the residual is
    # then the exact angular one, and c_ij of the gate is per head what radial_correlation says
    consensus: str = "none"
    # Appendix G.3: logarithms of angular variances that widen 1/κ̃ of a query, and 1/κ and 1/κ̃ of a key
    log_query_variance: Tensor | None = None  # (B,H,T)
    log_key_variance: Tensor | None = None  # (B,H,S)
    # Running sums of log λ, (B,H,S): κ of a pair is multiplied by the λ of all tokens after the key, up to the query
    forgotten: Tensor | None = None
    constant: bool = False  # κ is one number per head: nothing decays, magnitude is None
    bounded: bool = True  # False where κ grows without limit: no noise floor, but decay and information that stays
    documents: Tensor | None = None  # (B,S)
    dropout: float = 0.0
    return_weights: bool = False

    @property
    def score_dtype(self) -> torch.dtype:
        """Precision of scores, weights and evidence: fp32 or better."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def half(self) -> float:
        """d_h, the complex modes of a head: the scale of the residual."""
        return self.q.shape[3] / 2

    @property
    def only_plain(self) -> str | None:
        """Why no fast kernel can take this call, or None."""
        if self.return_weights:
            return NO_WEIGHTS
        if self.equilibrium is not None:
            return "the fast kernels do not know magnitudes that relax to m_eq (block/precision=equilibrium)"
        if self.consensus != "none":
            return f"the fast kernels do not know block/aggregate={self.consensus}"
        if self.log_query_variance is not None or self.log_key_variance is not None:
            return "the fast kernels do not know variances that every token brings along (block/precision=carried)"
        if self.kernel == "student_mle":
            return "the fast kernels do not know block/influence=student_mle"
        return None

    def cosine(self) -> Tensor:
        """c_ij of the radial channel, (B,T,S) or (1,1,1): all heads together."""
        if self.radial_correlation == "one":
            return self.v.new_ones(1, 1, 1, dtype=self.score_dtype)
        if self.radial_correlation == "vv":
            v = self.v.to(self.score_dtype).transpose(1, 2).flatten(2)
            return v[:, -self.q.shape[2] :] @ v.mT / v.shape[-1]  # ‖v‖ = √D
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1)
        q, k = (F.normalize(x.to(self.score_dtype).transpose(1, 2).flatten(2), dim=-1) for x in (self.q, k))
        return q @ k.mT

    def check(self) -> None:
        """Refuse what no backend can compute."""
        for key, value, allowed in (
            ("kernel", self.kernel, PLAIN_KERNELS),
            ("residual_form", self.residual_form, RESIDUAL_FORMS),
            ("radial", self.radial_mode, RADIAL_MODES),
            ("radial_correlation", self.radial_correlation, RADIAL_CORRELATIONS),
            ("consensus", self.consensus, CONSENSUS),
        ):
            if value not in allowed:
                raise ValueError(f"{key} is {value!r}; it must be one of {', '.join(allowed)}.")
        if self.residual_form == "dot" and self.kernel != "exponential":
            raise ValueError(f"residual_form='dot' is no distance, and kernel={self.kernel!r} needs one.")
        if self.kernel in ("student", "student_mle") and self.noise.nu is None:
            raise ValueError(f"kernel={self.kernel!r} needs the noise's nu.")
        if self.kernel == "exponential" and self.noise.tau is None:
            raise ValueError("kernel='exponential' needs the noise's tau.")
        if self.radial_mode != "off" and (self.radial is None or self.magnitude is None):
            raise ValueError(f"radial_mode={self.radial_mode!r} needs both the radial noise and the magnitude.")
        if self.consensus != "none" and (self.radial is None or self.magnitude is None):
            raise ValueError(f"consensus={self.consensus!r} needs both the radial noise and the magnitude.")
        correlated = self.radial_mode != "off" or self.consensus != "none"
        if correlated and self.radial_correlation == "qk" and self.kernel == "gaussian":
            raise ValueError("radial_correlation='qk' correlates queries and keys, and kernel='gaussian' has none.")
        q, k, v = self.q, self.k, self.v
        if q.shape[1] % k.shape[1] or k.shape != v.shape or q.shape[2] > k.shape[2] or q.shape[3] != k.shape[3]:
            raise ValueError(
                f"q {tuple(q.shape)} must be (B,H,T,Dh), k {tuple(k.shape)} and v {tuple(v.shape)} both (B,G,S,Dh) "
                "with G dividing H and T ≤ S."
            )
        if self.forgotten is not None and self.forgotten.shape != (q.shape[0], q.shape[1], k.shape[2]):
            raise ValueError(f"forgotten {tuple(self.forgotten.shape)} must be (B,H,S) of q and k.")
        if self.documents is not None and self.documents.shape != (k.shape[0], k.shape[2]):
            raise ValueError(f"documents {tuple(self.documents.shape)} must be (B,S) = {(k.shape[0], k.shape[2])}.")


@dataclass(frozen=True)
class AttentionOutput:
    """The directional estimate, its evidence, and the radial estimate where one was asked for."""

    v_bar: Tensor  # (B,H,T,Dh) Σ_j A_ij ṽ_j, still in the rotated frame
    log_evidence: Tensor  # (B,H,T) log P_attn = logsumexp_j L_ij, at least fp32
    m_bar: Tensor | None = None  # (B,T) radial estimate
    gate: Tensor | None = None  # (B,H,T) Σ_j A_ij Re g_ij of Appendix G.1
    weights: Weights | None = None  # with return_weights


@dataclass(frozen=True)
class Weights:
    """What the estimate is made of; entries of pairs that may not see each other carry no meaning but in A = 0."""

    directional: (
        Tensor  # (B,H,T,S) A, before dropout; times the decay of values where they decay, so that A v is the mean
    )
    log_kappa: Tensor  # (B or 1,H,T,S), of the measurement: without what was forgotten since
    log_kappa_tilde: Tensor  # (B or 1,H,T,S), capped as the logits use it
    robust: Tensor  # (B,H,T,S) w, 0 where nothing is seen
    radial: Tensor | None = None  # (B,T,S)
    gated: Tensor | None = None  # (B,H,T,S) A_ij Re g_ij, what values are summed with
