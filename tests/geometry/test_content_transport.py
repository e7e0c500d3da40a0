"""Content-dependent transport: T5 (unitary steps, their product, RoPE) and T6 (Householder, PaTH)."""

import math

import torch

from polarlm.geometry.content_transport import (
    aggregate_by_content,
    apply_local_step,
    cumulative_transport,
    into_common_frame,
    local_step,
    out_of_common_frame,
)
from polarlm.geometry.covariance import propagate, rt_covariance
from polarlm.geometry.transport import (
    phase_tables,
    rotate_aggregate_counter_rotate,
    to_complex,
    to_real,
    transport,
)
from tests.geometry.geometry_draws import for_all_seeds, normal, unit, weights

T, D = 6, 8
EYE = torch.eye(D // 2, dtype=torch.complex128)


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Phases (T, d), axes (T, D) of any length, angles (T)."""
    return normal(seed, T, D // 2), normal(seed + 1, T, D), 2.0 * normal(seed + 2, T)


def pairwise(steps: torch.Tensor) -> torch.Tensor:
    """Phi(i, j) = R_i ... R_{j+1} for j <= i by multiplying them out, zero above the diagonal: (T, T, d, d)."""
    phi = torch.zeros(T, T, D // 2, D // 2, dtype=steps.dtype)
    for j in range(T):
        phi[j, j] = EYE
        for i in range(j + 1, T):
            phi[i, j] = steps[i] @ phi[i - 1, j]
    return phi


def complex_rank(matrix: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix, atol=1e-9))


@for_all_seeds
def test_t5_every_step_is_unitary_whatever_the_angle(seed):
    steps = local_step(*draw(seed))
    torch.testing.assert_close(steps @ steps.mH, EYE.expand_as(steps))
    assert (steps - steps.mH).abs().max() > 1e-2  # and not because nothing happens


@for_all_seeds
def test_a_step_turns_its_axis_by_the_angle_and_nothing_else(seed):
    _, axis, angle = draw(seed)
    steps = local_step(torch.zeros(T, D // 2, dtype=torch.float64), axis, angle)
    along = to_complex(axis)
    turned = torch.einsum("tab,tb->ta", steps, along)
    torch.testing.assert_close(turned, torch.exp(1j * angle)[:, None] * along)  # sign: e^{+i phi}
    assert all(complex_rank(step - EYE) == 1 for step in steps)


@for_all_seeds
def test_a_step_costs_no_matrix(seed):
    phases, axis, angle = draw(seed)
    x = normal(seed + 3, T, D)
    expected = torch.einsum("tab,tb->ta", local_step(phases, axis, angle), to_complex(x))
    torch.testing.assert_close(to_complex(apply_local_step(x, phases, axis, angle)), expected)


@for_all_seeds
def test_t5_transport_is_the_ordered_product_and_factorises(seed):
    steps = local_step(*draw(seed))
    frames, phi = cumulative_transport(steps), pairwise(steps)
    for i in range(T):
        for j in range(i + 1):
            torch.testing.assert_close(frames[i] @ frames[j].mH, phi[i, j])
            torch.testing.assert_close(phi[i, j] @ phi[i, j].mH, EYE)
    # E28: the printed product does not say its order, and steps do not commute
    assert (steps[1] @ steps[2] - phi[2, 0]).abs().max() > 1e-2
    # the first step is a gauge
    other = cumulative_transport(torch.cat((local_step(*draw(seed + 9))[:1], steps[1:])))
    torch.testing.assert_close(other[-1] @ other[1].mH, phi[-1, 1])


@for_all_seeds
def test_t5_rotate_aggregate_counter_rotate_still_holds(seed):
    steps = local_step(*draw(seed))
    frames, phi = cumulative_transport(steps), pairwise(steps)
    q, k, v, a = normal(seed + 3, T, D), normal(seed + 4, T, D), normal(seed + 5, T, D), weights(seed + 6, T, T).tril()
    logits = into_common_frame(q, frames) @ into_common_frame(k, frames).T
    expected = torch.einsum("ia,ijab,jb->ij", to_complex(q).conj(), phi, to_complex(k)).real
    torch.testing.assert_close(logits.tril(), expected.tril())
    carried = torch.einsum("ij,ijab,jb->ia", a.to(phi.dtype), phi, to_complex(v))
    torch.testing.assert_close(to_complex(aggregate_by_content(a, v, frames)), carried)
    torch.testing.assert_close(out_of_common_frame(into_common_frame(v, frames), frames), v)


@for_all_seeds
def test_t5_without_content_it_is_rope(seed):
    w, axis = normal(seed, D // 2), normal(seed + 1, T, D)
    steps = local_step(w.expand(T, -1), axis, torch.zeros(T, dtype=torch.float64))
    frames, v, a = cumulative_transport(steps), normal(seed + 2, T, D), weights(seed + 3, T, T)
    for i in range(T):
        for j in range(i + 1):
            carried = to_real(frames[i] @ frames[j].mH @ to_complex(v[j]))
            torch.testing.assert_close(carried, transport(v[j], torch.tensor(float(i - j)).double(), w))
    tables = phase_tables(torch.arange(T).double(), -w)  # RoPE's sign of w is the paper's negated
    torch.testing.assert_close(aggregate_by_content(a, v, frames), rotate_aggregate_counter_rotate(a, v, *tables))


@for_all_seeds
def test_content_transport_keeps_the_rt_form(seed):
    """Prop. 2 asks for an isometry and no more: the covariance is RT again, at the transported direction."""
    frames, u = cumulative_transport(local_step(*draw(seed))), unit(seed + 4, D)
    phi = frames[4] @ frames[1].mH
    matrix = torch.cat((torch.cat((phi.real, -phi.imag), 1), torch.cat((phi.imag, phi.real), 1)), 0)
    moved = propagate(rt_covariance(u, 0.3, 2.0), matrix)
    torch.testing.assert_close(moved, rt_covariance(to_real(phi @ to_complex(u)), 0.3, 2.0))


@for_all_seeds
def test_t6_half_a_turn_is_a_householder_reflection(seed):
    _, axis, _ = draw(seed)
    half = torch.full((T,), math.pi, dtype=torch.float64)
    steps = local_step(torch.zeros(T, D // 2, dtype=torch.float64), axis, half)
    v = to_complex(axis / axis.norm(dim=-1, keepdim=True))
    reflection = EYE - 2 * v.unsqueeze(-1) * v.conj().unsqueeze(-2)
    torch.testing.assert_close(steps, reflection)
    torch.testing.assert_close(steps @ steps, EYE.expand_as(steps))
    # PaTH's I - beta v v^dagger is this step at beta = 2, and no isometry at any other beta but 0
    path = EYE - 1.5 * v.unsqueeze(-1) * v.conj().unsqueeze(-2)
    assert (path @ path.mH - EYE).abs().max() > 0.1
