"""The short ways of rotating and normalising give what the plain formulas give, gradients and second ones included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.estimator import Estimator
from polarlm.attention.projections import rotated_heads, sphere_heads
from polarlm.fast import passes
from polarlm.fast.passes import takes_pass, takes_products
from polarlm.geometry import project, tangential_part
from polarlm.geometry.multihead import PROJECTIONS, tangent_step
from polarlm.geometry.sphere import add_tangential, on_sphere
from polarlm.geometry.transport import rotary_tables, rotate
from polarlm.model.block import rms_norm
from polarlm.model.feed_forward import feed_forward
from polarlm.operations import plain

plain_rotate = plain(rotate)


def plain_on_sphere(x: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    rms = (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return rms, x / rms * radius


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(outputs, inputs, [torch.randn(o.shape, dtype=o.dtype) for o in outputs])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("per_document", [False, True])
def test_rotation_equals_geometry(inverse: bool, per_document: bool) -> None:
    positions = torch.randint(50, (2, 7)) if per_document else torch.arange(7)
    tables = rotary_tables(positions, 6, dtype=torch.float64)
    x = torch.randn(2, 7, 3, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    ours, theirs = rotate(x, *tables, inverse=inverse), plain_rotate(x, *tables, inverse=inverse)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients((ours,), [x]), gradients((theirs,), [x]), rtol=1e-13, atol=1e-13)
    torch.autograd.gradgradcheck(lambda x: rotate(x, *tables, inverse=inverse), x)


def test_rotation_of_low_precision_is_done_in_the_precision_of_the_tables() -> None:
    tables = rotary_tables(torch.arange(1000, 1007), 8)
    x = torch.randn(1, 2, 7, 8, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, *tables), plain_rotate(x, *tables))


def test_learned_phases_get_their_gradient() -> None:
    cos, sin = (t.requires_grad_() for t in rotary_tables(torch.arange(5), 4, dtype=torch.float64))
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    actual = gradients((rotate(x, cos, sin),), [cos, sin])
    torch.testing.assert_close(actual, gradients((plain_rotate(x, cos, sin),), [cos, sin]))


@pytest.mark.parametrize("learned_radius", [False, True])
def test_on_sphere_equals_the_plain_formula(learned_radius: bool) -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    radius: Tensor | float = torch.tensor(0.7, dtype=torch.float64, requires_grad=True) if learned_radius else 0.7
    inputs = [x, radius] if isinstance(radius, Tensor) else [x]
    ours, theirs = on_sphere(x, radius), plain_on_sphere(x, radius)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs), rtol=1e-12, atol=1e-12)
    torch.autograd.gradgradcheck(on_sphere, (x, radius))


def test_the_zero_vector_stays_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    rms, direction = on_sphere(x, 1.0)
    (rms.sum() + direction.sum()).backward()
    assert torch.isfinite(direction).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (63, 3, 6), (65, 2, 24), (200, 5, 32)])
@pytest.mark.parametrize("per_document", [False, True])
def test_native_rows_equal_the_plain_formulas(tokens: int, heads: int, size: int, per_document: bool) -> None:
    positions = torch.randint(50, (2, tokens)) if per_document else torch.arange(tokens)
    cos, sin = rotary_tables(positions, size)
    x = torch.randn(2, tokens, heads, size).transpose(1, 2).requires_grad_()
    assert takes_pass(x.detach())
    for inverse in (False, True):
        ours, theirs = rotate(x, cos, sin, inverse), plain_rotate(x, cos, sin, inverse)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert torch.equal(rotate(x, cos, sin, inverse), ours)
        torch.testing.assert_close(gradients((ours,), [x]), gradients((theirs,), [x]), rtol=1e-5, atol=1e-6)
    radius = torch.tensor(0.7, requires_grad=True)
    flat = torch.randn(2, tokens, heads * size, requires_grad=True)
    for rows in (x, flat):
        ours, theirs = on_sphere(rows, radius), plain_on_sphere(rows, radius)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            gradients(ours, [rows, radius]), gradients(theirs, [rows, radius]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("heads", [1, 3])
def test_one_turn_may_hold_for_all_tokens_and_one_per_head(heads: int) -> None:
    cos, sin = rotary_tables(torch.arange(1, heads + 1), 6)
    x = torch.randn(2, heads, 7, 6)
    for shape in ((1, -1), (1, 1, 1, -1)) if heads == 1 else ((1, heads, 1, -1),):
        tables = cos.view(shape), sin.view(shape)
        torch.testing.assert_close(rotate(x, *tables), plain_rotate(x, *tables))


def test_native_rows_can_be_differentiated_twice() -> None:
    x = torch.randn(2, 5, 8, requires_grad=True)
    second = []
    for sphere in (on_sphere, plain_on_sphere):
        (first,) = torch.autograd.grad(sphere(x, 0.7)[1].pow(3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)


def test_scalars_read_without_gradients_follow_every_change() -> None:
    values = {"a": torch.tensor([0.5, 0.0, 2.0]), "b": torch.tensor(0.3)}
    estimator = Estimator(values, frozen=["b"], known=["a", "b"])
    with torch.no_grad():
        first, again = estimator.read(), estimator.read()
        assert all(first[name] is again[name] for name in values), "nothing changed, nothing computed"
        for change in (lambda: estimator["a"].raw.add_(1.0), lambda: estimator["b"].raw.data.mul_(2.0)):
            change()
            for name, value in estimator.read().items():
                assert torch.equal(value, estimator[name]())
    assert estimator.read()["a"].requires_grad
    assert not estimator.read()["b"].requires_grad


@pytest.mark.parametrize(("batch", "tokens", "size"), [(1, 1, 32), (2, 63, 96), (3, 65, 128)])
def test_norm_equals_the_plain_formula(batch: int, tokens: int, size: int) -> None:
    x = torch.randn(batch, tokens, size).mul(2).requires_grad_()
    gain = torch.rand(size).add(0.5).requires_grad_()
    assert takes_pass(x.detach())
    ours, theirs = rms_norm(x, gain, 1e-3), F.rms_norm(x, (size,), gain, 1e-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients((ours,), [x, gain]), gradients((theirs,), [x, gain]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, gain, 1e-3), ours)


def maps(*sizes: tuple[int, int]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(*size, bias=False) for size in sizes]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_the_other_product_is_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_other_product", lambda: torch.ops.mkldnn._linear_pointwise)
    seen: list[Tensor] = []
    up, down = maps((10, 96), (96, 10))
    x = torch.randn(3, 43, 10, requires_grad=True)
    ours, theirs = feed_forward(x, up, down, "gelu"), plain_feed_forward(x, up, down, "gelu")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    inputs = [x, up.weight, down.weight]
    torch.testing.assert_close(gradients((ours,), inputs), gradients((theirs,), inputs), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(passes, "_other_product", lambda: lambda x, *_: seen.append(x) or x)
    assert passes.matrix_product(x, up.weight) is x and len(seen) == 1, "many rows go there"
    assert passes.matrix_product(x[:1], up.weight).shape == (1, 43, 96) and len(seen) == 1, "few rows do not"


def plain_feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear, kind: str) -> Tensor:
    hidden = up(x)
    return down(F.gelu(hidden) if kind == "gelu" else F.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1])


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize(("batch", "tokens", "d", "hidden"), [(1, 1, 6, 32), (2, 63, 10, 96), (3, 65, 32, 64)])
def test_feed_forward_equals_the_plain_formula(kind: str, batch: int, tokens: int, d: int, hidden: int) -> None:
    up, down = maps((d, hidden if kind == "gelu" else 2 * hidden), (hidden, d))
    x = torch.randn(batch, tokens, d).mul(4).requires_grad_()
    assert takes_products(x.detach(), up, down)
    inputs = [x, up.weight, down.weight]
    ours, theirs = feed_forward(x, up, down, kind), plain_feed_forward(x, up, down, kind)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients((ours,), inputs), gradients((theirs,), inputs), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(feed_forward(x, up, down, kind), ours)
    down.weight.requires_grad_(False)
    frozen = feed_forward(x, up, down, kind), plain_feed_forward(x, up, down, kind)
    torch.testing.assert_close(*(gradients((y,), [x, up.weight]) for y in frozen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "size", "tokens"), [((1, 1, 1), 2, 1), ((3, 3, 3), 6, 63), ((4, 2, 2), 32, 65)])
@pytest.mark.parametrize("per_document", [False, True])
def test_rotated_heads_equal_the_plain_formula(heads: tuple, size: int, tokens: int, per_document: bool) -> None:
    (layer,) = maps((10, sum(heads) * size))
    positions = torch.randint(50, (2, tokens)) if per_document else torch.arange(tokens)
    tables = rotary_tables(positions, size)
    x = torch.randn(2, tokens, 10, requires_grad=True)
    ours = rotated_heads(x, layer, heads, *tables)
    q, k, v = layer(x).unflatten(-1, (sum(heads), size)).transpose(1, 2).split(heads, 1)
    theirs = plain_rotate(q, *tables), plain_rotate(k, *tables), v
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    inputs = [x, layer.weight]
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs), rtol=1e-4, atol=1e-4)


def plain_sphere_heads(x: Tensor, qk: nn.Linear, v: nn.Linear, heads: tuple[int, int], radius: Tensor, *tables: Tensor):
    m, direction = plain_on_sphere(v(x), 1.0)
    q_k = plain_on_sphere(qk(x).unflatten(-1, (sum(heads), -1)), radius)[1].transpose(1, 2)
    turned = plain_rotate(direction.unflatten(-1, (heads[1], -1)).transpose(1, 2), *tables)
    return *plain_rotate(q_k, *tables).split(heads, 1), turned, m


@pytest.mark.parametrize(("heads", "size", "tokens"), [((1, 1), 2, 1), ((3, 3), 6, 63), ((4, 2), 32, 65)])
@pytest.mark.parametrize("per_document", [False, True])
def test_sphere_heads_equal_the_plain_formula(heads: tuple, size: int, tokens: int, per_document: bool) -> None:
    qk, v = maps((10, sum(heads) * size), (10, heads[1] * size))
    positions = torch.randint(50, (2, tokens)) if per_document else torch.arange(tokens)
    tables = rotary_tables(positions, size)
    x, radius = torch.randn(2, tokens, 10, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    ours, theirs = (make(x, qk, v, heads, radius, *tables) for make in (sphere_heads, plain_sphere_heads))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    inputs = [x, qk.weight, v.weight, radius]
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("heads", "size", "tokens"), [(1, 2, 1), (3, 6, 63), (2, 32, 65)])
@pytest.mark.parametrize("per_document", [False, True])
def test_tangent_step_equals_the_plain_formula(heads: int, size: int, tokens: int, per_document: bool) -> None:
    tables = rotary_tables(torch.randint(50, (2, tokens)) if per_document else torch.arange(tokens), size)
    v = torch.randn(2, tokens, heads, size).transpose(1, 2).requires_grad_()
    v_bar = torch.randn(2, heads, tokens, size, requires_grad=True)
    alpha = torch.tensor(0.7, requires_grad=per_document)
    ours = tangent_step(v, v_bar, alpha, *tables)
    theirs = plain_rotate(alpha * project(v, v_bar, mode="per_head"), *tables, inverse=True).transpose(1, 2)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    inputs = [v, v_bar, alpha] if per_document else [v, v_bar]
    torch.testing.assert_close(gradients((ours,), inputs), gradients((theirs,), inputs), rtol=1e-3, atol=1e-4)
    nothing = torch.zeros_like(v, requires_grad=True)
    step = tangent_step(nothing, v_bar, torch.tensor(1.0), *tables)
    torch.testing.assert_close(step, plain_rotate(v_bar, *tables, inverse=True).transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in gradients((step,), [nothing, v_bar]))


@pytest.mark.parametrize(("heads", "size", "tokens"), [(1, 2, 1), (3, 6, 63), (2, 32, 65)])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("radial", [False, True])
def test_steps_of_every_projection(
    heads: int, size: int, tokens: int, projection: Any, clamp: Any, radial: bool
) -> None:
    tables = rotary_tables(torch.randint(50, (2, tokens)), size)
    v = torch.randn(2, tokens, heads, size).transpose(1, 2).requires_grad_()
    v_bar = torch.randn(2, heads, tokens, size, requires_grad=True)
    evidence = torch.randn(2, heads, tokens, requires_grad=True)
    change = torch.randn(2, tokens, requires_grad=True) if radial else None
    ours = tangent_step(v, v_bar, torch.tensor(0.7), *tables, projection, evidence, clamp, change)
    known = evidence.transpose(1, 2)
    step = 0.7 * project(v.transpose(1, 2), v_bar.transpose(1, 2), known, projection, clamp).transpose(1, 2)
    step = step + (0 if change is None else change[:, None, :, None]) * v
    theirs = plain_rotate(step, *tables, inverse=True).transpose(1, 2)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    inputs = [v, v_bar, *([evidence] if projection == "evidence" else []), *([] if change is None else [change])]
    torch.testing.assert_close(gradients((ours,), inputs), gradients((theirs,), inputs), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("batch", "tokens", "size"), [(1, 1, 1), (2, 67, 33), (3, 64, 128), (1, 130, 7)])
def test_a_step_across_the_stream_equals_the_plain_formula(batch: int, tokens: int, size: int) -> None:
    x, step = (torch.randn(batch, size, tokens).transpose(1, 2).requires_grad_() for _ in range(2))
    assert takes_pass(x)
    ours = add_tangential(x, step)
    wide_x, wide_step = (t.detach().double().requires_grad_() for t in (x, step))
    theirs = wide_x + tangential_part(wide_x, wide_step)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    actual, expected = gradients((ours,), [x, step]), gradients((theirs.float(),), [wide_x, wide_step])
    near = 2e-4 if size == 1 else 2e-5  # one channel: nothing of a step is across, and gradients are differences
    torch.testing.assert_close(actual, tuple(g.float() for g in expected), rtol=near, atol=near)
    half, other = x.detach().bfloat16(), step.detach().bfloat16()
    plain = half + tangential_part(half.float(), other.float()).bfloat16()
    assert torch.equal(add_tangential(half, other), plain)


def test_a_stream_of_zeros_takes_the_whole_step() -> None:
    x, step = torch.zeros(1, 2, 8, requires_grad=True), torch.randn(1, 2, 8, requires_grad=True)
    y = add_tangential(x, step)
    assert torch.equal(y, step) and all(g.isfinite().all() for g in gradients((y,), [x, step]))


def test_a_head_without_a_value_takes_no_part_in_the_evidence() -> None:
    tables = rotary_tables(torch.arange(5), 8)
    v, v_bar, evidence = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5)
    v[:, 1] = 0
    inputs = [x.requires_grad_() for x in (v, v_bar, evidence)]
    ours = tangent_step(v, v_bar, torch.tensor(1.0), *tables, "evidence", evidence, 8.0)
    step = project(v.transpose(1, 2), v_bar.transpose(1, 2), evidence.transpose(1, 2), "evidence", 8.0).transpose(1, 2)
    torch.testing.assert_close(ours, plain_rotate(step, *tables, inverse=True).transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in gradients((ours,), inputs))


def test_products_somebody_listens_to_take_the_ordinary_way() -> None:
    x, seen = torch.randn(1, 3, 8), []
    up, down = maps((8, 32), (32, 8))
    assert takes_products(x, up, down)
    up.register_forward_hook(lambda module, given, out: seen.append(out))
    expected = plain_feed_forward(x, up, down, "gelu")
    torch.testing.assert_close(feed_forward(x, up, down, "gelu"), expected)
    assert len(seen) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes_products(x, down)
        assert feed_forward(x, up, down, "gelu").dtype == torch.bfloat16


def test_norm_and_activations_of_extreme_numbers_stay_finite() -> None:
    x = torch.tensor([0.0, 1e-20, 200.0, -200.0]).repeat(1, 3, 8).requires_grad_()
    same = nn.Linear(32, 32, bias=False)
    same.weight = nn.Parameter(torch.eye(32))
    half = nn.Linear(16, 32, bias=False)
    total = rms_norm(x, torch.ones(32), 1e-6).sum() + rms_norm(0 * x, torch.ones(32), 1e-6).sum()
    total = total + feed_forward(x, same, half, "swiglu").sum()
    gelu = feed_forward(x, same, same, "gelu")
    (total + gelu.sum()).backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert torch.equal(gelu, F.gelu(x)), "its limits are exact"


def evidence_step(x: Tensor, step: Any) -> Tensor:
    """Of two heads, everything a part of x (2, 5, 32)."""
    v, v_bar = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in x.chunk(2, -1))
    evidence, change = x[..., :2].transpose(1, 2), x[..., 3]
    return step(v, v_bar, torch.tensor(0.7), *rotary_tables(torch.arange(5), 8), "evidence", evidence, 8.0, change)


def test_what_is_one_node_can_be_differentiated_twice() -> None:
    x, gain = torch.randn(2, 5, 32, requires_grad=True), torch.rand(32, requires_grad=True)
    up, down = maps((32, 64), (64, 32))
    wide, narrow = maps((32, 64), (32, 32))
    tables = rotary_tables(torch.arange(5), 8)

    def plain_heads() -> Tensor:
        q, k, v = wide(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
        return torch.cat((plain_rotate(q, *tables), plain_rotate(k, *tables), v), 1)

    makers = sphere_heads, plain_sphere_heads
    pairs = [
        (lambda: rms_norm(x, gain, 1e-6), lambda: F.rms_norm(x, (32,), gain, 1e-6)),
        (lambda: add_tangential(x, x.sin() * gain), lambda: x + tangential_part(x, x.sin() * gain)),
        (lambda: feed_forward(x, up, down, "gelu"), lambda: plain_feed_forward(x, up, down, "gelu")),
        (lambda: feed_forward(x, wide, narrow, "swiglu"), lambda: plain_feed_forward(x, wide, narrow, "swiglu")),
        (lambda: torch.cat(rotated_heads(x, wide, (4, 2, 2), *tables), 1), plain_heads),
        *(
            tuple((lambda make=make, i=i: make(x, wide, narrow, (4, 4), gain[0], *tables)[i]) for make in makers)
            for i in range(4)
        ),
        (
            lambda: tangent_step(x[:, None, :, :8], x[:, None, :, 8:16], torch.tensor(0.7), *tables),
            lambda: plain_rotate(0.7 * project(x[..., :8], x[..., 8:16], mode="per_head"), *tables, inverse=True),
        ),
        (
            lambda: evidence_step(x, tangent_step),
            lambda: evidence_step(
                x,
                lambda v, v_bar, scale, cos, sin, mode, evidence, clamp, change: plain_rotate(
                    scale * project(*(y.transpose(1, 2) for y in (v, v_bar, evidence)), mode, clamp).transpose(1, 2)
                    + change[:, None, :, None] * v,
                    cos,
                    sin,
                    inverse=True,
                ).transpose(1, 2),
            ),
        ),
    ]
    for pair in pairs:
        second = []
        for function in pair:
            (first,) = torch.autograd.grad(function().pow(3).sum(), x, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), x)[0])
        torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)
