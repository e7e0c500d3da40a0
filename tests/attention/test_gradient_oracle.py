"""Gradients of the fast path in fp32 equal float64's of the plain one, as far as the problem's conditioning allows.

Combinations of all switches are drawn anew from a printed seed (POLARLM_ORACLE_SEED repeats one). The float64 reference
itself is held to the paper by test_oracle.py, and its derivatives to differences by the contract.
"""

import copy

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, TokenContext
from polarlm.attention.additions import FIRST_VALUES
from polarlm.geometry import rotary_tables
from polarlm.model.gpt import document_positions
from tests.attention.test_oracle import HEADS, SEED, certain, draw

WIDTH, TOKENS, BASE = 32, 24, 100.0
ROUNDING = 2**-23  # relative, of an fp32 number
# An algorithm may lose this many times what rounded inputs lose anyway; the worst of 270 drawn ones lost 21 times.
ALLOWED = 200
# Of the largest gradient in the layer: one that cancels to 1e-21 in float64 is noise of this size in fp32.
FLOOR = 2e-6
# Those in which fp32 failed once: a saturated exponential kernel, which no robust weight holds down.
SATURATED = [
    {"norm_position": position, "kernel": "exponential", "irls_steps": 3, "consensus": "none", "residual_form": form}
    for position in ("post", "pre")
    for form in ("full", "dot")
]
PLAIN = {"consensus": "none", "uncertainty": "none", "radial_flow": "decay"}  # what the native kernels take


def stirred(switches: dict, other: dict, number: int) -> PolarAttention:
    shape = MixerShape(WIDTH, HEADS, other["groups"], WIDTH // HEADS, layer=1, n_layer=3, rope_base=BASE)
    torch.manual_seed(number)
    scalars = dict(mu=0.2, m_eq=0.6, nu_t=[1.0, 2.0, 3.0, 5.0], tau=0.8, alpha=0.7, beta=0.3)
    mixer = PolarAttention(shape, **scalars, **switches, mu_r=other["mu_r"], widen_k=other["widen_k"])
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if any(part in name for part in ("log_frequency", "gain", "estimator", "share", "forget.offset")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "transport.angles" in name or "head_gate" in name:  # fresh ones are zero
                parameter.normal_()
            else:
                parameter.mul_(2.0)
    return mixer


def gradients(mixer: PolarAttention, x: torch.Tensor, packed: bool) -> dict[str, torch.Tensor]:
    """Of a fixed linear function of the output, with respect to the input and every parameter, in float64."""
    x = x.clone().requires_grad_()
    documents = (torch.arange(TOKENS) >= 9).long().expand(2, TOKENS) if packed else None
    positions = torch.arange(TOKENS) if documents is None else document_positions(documents)
    rotary = rotary_tables(positions, mixer.rotary_dim, BASE, dtype=x.dtype)
    generator = torch.Generator().manual_seed(1)

    def fixed(size: int) -> torch.Tensor:
        return torch.randn(2, TOKENS, size, generator=generator).to(x.dtype)

    shared = {"log_precision_0": fixed(HEADS), FIRST_VALUES: fixed(mixer.v.weight.shape[0])}
    out = mixer(x, TokenContext(rotary, documents, positions=positions, shared=shared))
    learned = {"x": x} | {name: p for name, p in mixer.named_parameters() if p.requires_grad}
    results = torch.autograd.grad((out * fixed(WIDTH)).sum(), list(learned.values()), allow_unused=True)
    return {  # a backend may know that nothing depends on a parameter, or find that its gradient is 0
        name: torch.zeros_like(value).double() if gradient is None else gradient.double()
        for (name, value), gradient in zip(learned.items(), results)
    }


def rounded(mixer: PolarAttention, x: torch.Tensor, number: int) -> tuple[PolarAttention, torch.Tensor]:
    """The same with inputs and weights changed by about a rounding of fp32."""
    generator = torch.Generator().manual_seed(number)
    other = copy.deepcopy(mixer)

    def change(z: torch.Tensor) -> torch.Tensor:
        return z * (1 + ROUNDING * torch.randn(z.shape, generator=generator, dtype=z.dtype))

    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(change(parameter))
    return other, change(x)


def combination(number: int) -> tuple[dict, dict]:
    if number >= DRAWN:
        return certain(number, PLAIN | {"retract": "none", "evidence_clamp": 8.0} | SATURATED[number - DRAWN])
    switches, other = draw(number)
    return switches | (PLAIN if number % 2 else {}), other


DRAWN = 24


@pytest.mark.parametrize("number", range(DRAWN + len(SATURATED)))
def test_fp32_gradients_of_the_fast_path_are_right_as_far_as_rounding_lets_them(number):
    switches, other = combination(number)
    other["packed"] = other["packed"] or number >= DRAWN
    print(f"POLARLM_ORACLE_SEED={SEED} combination {number}: {switches} {other}")
    mixer, x = stirred(switches, other, number), torch.randn(2, TOKENS, WIDTH)
    plain = copy.deepcopy(mixer).double()
    plain.backend = "reference"
    exact = gradients(plain, x.double(), other["packed"])
    nearby = [gradients(*rounded(plain, x.double(), draw), other["packed"]) for draw in range(3)]
    mixer.backend = "auto"
    actual = gradients(mixer, x, other["packed"])
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    for name, gradient in exact.items():
        sensitive = max(float((near[name] - gradient).abs().max()) for near in nearby)
        error = float((actual[name] - gradient).abs().max())
        allowed = ALLOWED * sensitive + FLOOR * largest
        assert error <= allowed, f"{name}: off by {error:.1e}, allowed {allowed:.1e} (conditioning {sensitive:.1e})"
