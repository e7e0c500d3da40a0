"""What the filtering blocks (RFA, Polar) share around `robust_attention`: the record and the cost."""

from __future__ import annotations

from polarlm.attention.mixer import Record, mean_visible
from polarlm.attention.robust import AttentionOutput

# Element-wise work per query-key pair and head: two precisions, the residual, the kernel and its logarithm.
LOGIT_FLOPS = 16
WIDENING_FLOPS = 5  # of 1/(1/kappa + variance) in logarithms, per pair and head


def record_estimate(record: Record, output: AttentionOutput) -> None:
    """Add weights, evidence, precisions (B or 1, H, T, S) and robust weights of one robust attention to a record."""
    weights = output.weights
    assert weights is not None, "ask robust_attention for its weights"
    record.update(weights=weights.directional, log_evidence=output.log_evidence)
    record.update(log_kappa=weights.log_kappa, log_kappa_tilde=weights.log_kappa_tilde)
    record["robust_weight"] = weights.robust
    if weights.radial is not None:
        record["radial_weights"] = weights.radial
    if weights.gated is not None:
        record["gated_weights"] = weights.gated


def robust_flops(context: int, heads: int, head_dim: int, radial_correlation: str | None = None) -> int:
    """Forward FLOPs per token of the attention itself: scores, logits, aggregation, and the radial channel.

    Of its correlations only `vv` needs products of its own; `qk` sums those of the scores over the heads.
    """
    per_pair = heads * (4 * head_dim + LOGIT_FLOPS)
    if radial_correlation is not None:
        per_pair += LOGIT_FLOPS + {"vv": 2 * heads * head_dim, "qk": heads, "one": 0}[radial_correlation]
    return int(mean_visible(context) * per_pair)


def gate_flops(context: int, heads: int, head_dim: int, consensus: str, correlation: str) -> int:
    """What Appendix G.1 adds per token: correlations of its own (`vv`), the gate, and complex parts where asked for."""
    if consensus == "none":
        return 0
    per_pair = LOGIT_FLOPS + (2 * head_dim if correlation == "vv" else 0)
    if consensus == "complex":  # imaginary parts of residual, correlation and sum
        per_pair += 2 * head_dim * (3 if correlation != "one" else 1)
    return int(mean_visible(context) * heads * per_pair)


def widening_flops(context: int, heads: int) -> int:
    """What a variance that tokens bring along (Appendix G.3) adds per token to one precision of every pair."""
    return int(mean_visible(context) * heads * WIDENING_FLOPS)
