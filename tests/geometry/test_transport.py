"""Rotation transport: T1-T4, RoPE's conventions, the polar dynamics, Appendix F's real algebra."""

import pytest
import torch

from polarlm.geometry.likelihood import correlation
from polarlm.geometry.transport import (
    phase_tables,
    rotary_frequencies,
    rotary_tables,
    rotate,
    rotate_aggregate_counter_rotate,
    to_complex,
    to_real,
    transport,
    transport_pairwise,
)
from tests.geometry.geometry_draws import for_all_seeds, normal, weights

T, D = 7, 8


def sequence(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions with gaps, frequencies, and q, k, v."""
    positions = normal(seed, T).abs().cumsum(0)
    return positions, normal(seed + 1, D // 2), normal(seed + 2, T, D), normal(seed + 3, T, D), normal(seed + 4, T, D)


@for_all_seeds
def test_t1_rotate_aggregate_counter_rotate_is_pairwise_transport(seed):
    t, w, _, _, v = sequence(seed)
    a = weights(seed + 5, T, T)
    fast = rotate_aggregate_counter_rotate(a, v, *phase_tables(t, w))
    pairwise = torch.einsum("ij,ijd->id", a, transport_pairwise(v, t, -w))  # RoPE's sign is the paper's with -w
    torch.testing.assert_close(fast, pairwise)
    assert not torch.allclose(fast, torch.einsum("ij,ijd->id", a, transport_pairwise(v, t, w)))


@for_all_seeds
def test_t1_holds_with_the_papers_own_sign(seed):
    t, w, _, _, v = sequence(seed)
    a, (cos, sin) = weights(seed + 5, T, T), phase_tables(t, w)
    papers = rotate(a @ rotate(v, cos, sin, inverse=True), cos, sin)  # Phi+ (V~ A^T), V~ = Phi- V
    torch.testing.assert_close(papers, torch.einsum("ij,ijd->id", a, transport_pairwise(v, t, w)))


@for_all_seeds
def test_t2_correlation_depends_on_the_lag_only(seed):
    t, w, q, k, v = sequence(seed)
    logits = rotate(q, *phase_tables(t, w)) @ rotate(k, *phase_tables(t, w)).T
    lag = t[:, None] - t
    expected = (to_complex(q)[:, None].conj() * torch.exp(-1j * w * lag[..., None]) * to_complex(k)).sum(-1).real
    torch.testing.assert_close(logits, expected)
    shifted = phase_tables(t + 3.7, w)
    torch.testing.assert_close(rotate(q, *shifted) @ rotate(k, *shifted).T, logits)
    a = weights(seed + 5, T, T)
    torch.testing.assert_close(
        rotate_aggregate_counter_rotate(a, v, *shifted), rotate_aggregate_counter_rotate(a, v, *phase_tables(t, w))
    )


@for_all_seeds
def test_t3_sign_of_a_frequency_is_a_gauge(seed):
    t, w, q, k, v = sequence(seed)
    a, mode = weights(seed + 5, T, T), seed % (D // 2)
    flipped = w.clone()
    flipped[mode] *= -1

    def conjugate(x):
        modes = to_complex(x)
        return to_real(torch.cat((modes[..., :mode], modes[..., mode : mode + 1].conj(), modes[..., mode + 1 :]), -1))

    before, after = phase_tables(t, w), phase_tables(t, flipped)
    torch.testing.assert_close(
        rotate(conjugate(q), *after) @ rotate(conjugate(k), *after).T, rotate(q, *before) @ rotate(k, *before).T
    )
    torch.testing.assert_close(
        conjugate(rotate_aggregate_counter_rotate(a, conjugate(v), *after)),
        rotate_aggregate_counter_rotate(a, v, *before),
    )


def test_t4_no_frequency_no_rotation():
    t, w, _, _, v = sequence(0)
    a = weights(1, T, T)
    torch.testing.assert_close(rotate_aggregate_counter_rotate(a, v, *phase_tables(t, torch.zeros_like(w))), a @ v)


def test_rotate_turns_counter_clockwise_by_the_phase():
    cos, sin = phase_tables(torch.tensor([1.0]), torch.tensor([0.3, 0.5]))
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), cos, sin)  # modes 1 and i
    expected = [torch.cos(cos.new_tensor(0.3)), -torch.sin(cos.new_tensor(0.5)), torch.sin(cos.new_tensor(0.3))]
    torch.testing.assert_close(turned[0, :3], torch.stack(expected))


@for_all_seeds
def test_rotation_keeps_norms_and_its_inverse_undoes_it(seed):
    t, w, x, _, _ = sequence(seed)
    tables = phase_tables(t, w)
    moved = rotate(x, *tables)
    torch.testing.assert_close(moved.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(moved, *tables, inverse=True), x)
    torch.testing.assert_close(to_complex(moved), to_complex(x) * torch.exp(1j * w * t[:, None]))


def test_tables_and_rotation_are_llamas():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, (cos, sin) = torch.randn(2, 3, T, D), rotary_tables(torch.arange(T), D, 500.0)
    config = llama.LlamaConfig(hidden_size=D * 3, num_attention_heads=3, head_dim=D)
    config.rope_theta = 500.0
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    their_cos, their_sin = llama.LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    torch.testing.assert_close(torch.cat((cos, cos), -1)[None], their_cos)
    theirs, _ = llama.apply_rotary_pos_emb(x, x, their_cos, their_sin)
    torch.testing.assert_close(rotate(x, cos, sin), theirs)


def test_positions_may_differ_between_rows_of_a_batch():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    x = torch.randn(2, 3, 4, D)
    together = rotate(x, *rotary_tables(positions, D))
    for row in range(2):
        torch.testing.assert_close(together[row], rotate(x[row], *rotary_tables(positions[row], D)))


def test_low_precision_input_keeps_its_dtype_but_not_its_phase_error():
    x = torch.randn(1, D)
    tables = rotary_tables(torch.tensor([1001]), D)
    turned = rotate(x.bfloat16(), *tables)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x, *tables), atol=0.03, rtol=0.02)


def test_odd_dimension_is_refused():
    with pytest.raises(ValueError, match="even"):
        rotary_frequencies(7)


@for_all_seeds
def test_flow_obeys_the_polar_dynamics(seed):
    """Eq. rt_polar_dynamics: x' = (-mu + i w) x, so m' = -mu m and u' = i w u; and flows compose."""
    w, x, mu = normal(seed, D // 2), normal(seed + 1, D), 0.3
    time = torch.tensor(0.8, dtype=torch.float64)
    state, rate = torch.func.jvp(lambda t: transport(x, t, w, mu), (time,), (torch.ones_like(time),))
    torch.testing.assert_close(to_complex(rate), (-mu + 1j * w) * to_complex(state))
    torch.testing.assert_close(state.norm(), x.norm() * torch.exp(-mu * time))
    _, turn = torch.func.jvp(
        lambda t: torch.nn.functional.normalize(transport(x, t, w, mu), dim=-1), (time,), (torch.ones_like(time),)
    )
    torch.testing.assert_close(to_complex(turn), 1j * w * to_complex(state) / state.norm())
    torch.testing.assert_close(transport(state, time * 2, w, mu), transport(x, time * 3, w, mu))


@for_all_seeds
def test_complex_algebra_in_real_coordinates(seed):
    """Appendix F.1: the block matrix of a complex map, and real and imaginary part of a correlation."""
    real, imag, x, y = normal(seed, 4, 4), normal(seed + 1, 4, 4), normal(seed + 2, D), normal(seed + 3, D)
    block = torch.cat((torch.cat((real, -imag), 1), torch.cat((imag, real), 1)), 0)
    torch.testing.assert_close(to_complex(block @ x), torch.complex(real, imag) @ to_complex(x))
    (xr, xi), (yr, yi) = x.chunk(2), y.chunk(2)
    c = correlation(x, y, "complex")
    torch.testing.assert_close(c.real, correlation(x, y))
    torch.testing.assert_close(c.real, xr @ yr + xi @ yi)
    torch.testing.assert_close(c.imag, xr @ yi - xi @ yr)
