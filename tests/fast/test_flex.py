"""FlexAttention's score_mod gives the reference's outputs, and its derivative through torch's unfused path as well."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention

from polarlm.attention.robust import KERNELS, RobustCall, robust_attention
from polarlm.errors import UserError
from polarlm.fast import flex_backend
from tests.fast.cases import make_case


def unfused(call: RobustCall) -> tuple[Tensor, Tensor]:
    """What torch evaluates on a CPU without its guard against gradients, which the score_mod itself has."""
    mask = flex_backend._block_mask(call.documents, call.q.shape[0], call.q.shape[2], "cpu")
    v_bar, log2_evidence, _ = math_attention(
        call.q, call.k, call.v, flex_backend.logits(call), mask.as_tuple(), scale=1.0, kernel_options={}
    )
    return v_bar, log2_evidence * math.log(2)


@pytest.fixture(autouse=True)
def _unfused_on_purpose():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*unfused implementation.*")
        yield


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("magnitude", "decay", "packed"), [(True, False, False), (False, True, True)])
def test_outputs_and_gradients_of_every_leaf(kernel: str, magnitude: bool, decay: bool, packed: bool) -> None:
    torch.manual_seed(0)
    case = make_case(queries=14, magnitude=magnitude, process=decay)
    documents = (torch.arange(14) // 6).expand(2, 14) if packed else None
    call = case.call(kernel=kernel, decay_keys=decay, documents=documents)
    expected = robust_attention(call, "reference")
    outputs, truth = unfused(call), (expected.v_bar, expected.log_evidence)
    torch.testing.assert_close(outputs, truth, rtol=1e-6, atol=1e-8)
    leaves, upstream = list(case.leaves().values()), [torch.randn_like(x) for x in truth]
    actual, right = (torch.autograd.grad(x, leaves, upstream, allow_unused=True) for x in (outputs, truth))
    for ours, theirs, name in zip(actual, right, case.leaves()):
        theirs = torch.zeros(()) if theirs is None else theirs
        ours = torch.zeros_like(theirs) if ours is None else ours
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max().clamp_min(1e-3), name


def test_a_past_that_fades() -> None:
    torch.manual_seed(0)
    case = make_case(queries=14, forgets=0.5)
    call = case.call(kernel="exponential", residual_form="dot")
    expected = robust_attention(call, "reference")
    outputs, truth = unfused(call), (expected.v_bar, expected.log_evidence)
    torch.testing.assert_close(outputs, truth, rtol=1e-6, atol=1e-8)
    leaves, upstream = (case.q, case.k, case.v, case.forgotten), [torch.randn_like(x) for x in truth]
    actual, right = (torch.autograd.grad(x, leaves, upstream) for x in (outputs, truth))
    torch.testing.assert_close(actual, right, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_the_backend_itself_without_gradients() -> None:
    case = make_case(queries=70, groups=2, dtype=torch.float32, size=16)
    options = dict(kernel="student", radial_mode="own", radial_correlation="qk")
    ours, truth = (robust_attention(case.call(**options), name) for name in ("flex", "reference"))
    for name in ("v_bar", "log_evidence", "m_bar"):
        torch.testing.assert_close(getattr(ours, name), getattr(truth, name), rtol=1e-4, atol=1e-5)


def test_the_cross_term_alone() -> None:
    case = make_case(queries=9)
    call = case.call(kernel="exponential", residual_form="dot")
    torch.testing.assert_close(unfused(call)[0], robust_attention(call, "reference").v_bar, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "FlexAttention has no backward pass on cpu"),
        ({"dropout": 0.1}, "it does not drop weights"),
        ({"decay_values": True}, "comes after the soft-max"),
        ({"radial_mode": "shared"}, "weights of all heads together"),
        ({"return_weights": True}, "weights that were asked for"),
        ({"bounded": False}, "without a noise floor"),
        ({"q": torch.zeros(2, 4, 1, 8, dtype=torch.float64)}, "for every number of cached keys"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_sentence(options: dict, reason: str) -> None:
    with pytest.raises(UserError, match=rf"block\.backend=flex cannot do this: .*{reason}.*Use block\.backend=auto\.$"):
        robust_attention(make_case().call(kernel="student", **options), "flex")
