"""A setting is said to be without effect exactly where no value of it changes what the block computes.

Combinations are drawn anew from a printed seed; in each, every scalar and every switch is given another value.
"""

import zlib

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, TokenContext
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from tests.attention.test_oracle import HEADS, SEED, SWITCHES, TOKENS, WIDTH, draw

OTHER = dict(
    nu_t=5.0, tau=2.0, eta_tq=0.7, eta_tk=0.6, sigma_t0=0.5, m_inf=0.4, radius=1.7, alpha=0.5, beta=0.6, m_eq=1.9,
    nu_r=7.0, eta_rq=0.9, eta_rk=0.8, sigma_r0=0.7, prior_share=0.3, context_power=0.2, relax_a=0.5, relax_b=0.4,
    widen_q=0.4, widen_k=0.5, forget_bias=1.0, mu=0.3, mu_r=0.2, mu_spread=False, evidence_clamp=0.01,
)  # fmt: skip
# Of these a value may be idle: whichever of the two is set, it is the other settings that decide.
WORDS = {
    "projector": ["real", "complex"],
    "radial_flow": ["decay", "equilibrium"],
    "norm_scope": SWITCHES["norm_scope"],
}
WORDS |= {"radial_correlation": ["vv", "one"], "frequencies": ["shared", "per_head"]}


def output(settings: dict, heads: int, groups: int) -> tuple[torch.Tensor, set[str]]:
    """What a block with weights that depend on their names alone makes of one text, and what it calls idle."""
    shape = MixerShape(WIDTH, heads, groups, WIDTH // HEADS, layer=1, n_layer=3, rope_base=100.0)
    mixer = PolarAttention(shape, **settings).double()
    weighed = settings["projection"] == "evidence" or {settings["consensus"], settings["uncertainty"]} != {"none"}
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if not weighed and name in ("estimator.eta_tk.raw", "estimator.sigma_t0.raw"):
                continue  # a common factor of both, which cancels, would not survive this noise before the soft-plus
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    generator = torch.Generator().manual_seed(1)
    x, before = (torch.randn(2, TOKENS, size, generator=generator, dtype=torch.float64) for size in (WIDTH, heads))
    rotary = rotary_tables(torch.arange(TOKENS), mixer.rotary_dim, 100.0, dtype=torch.float64)
    context = TokenContext(rotary, positions=torch.arange(TOKENS), shared={"log_precision_0": before})
    with torch.no_grad():
        return mixer(x, context), mixer.without_effect()


# Found wrong once: what differs from a drawn combination, what is idle then, and what is not.
NAMED = [
    (dict(projection="evidence", heads=1), {"evidence_clamp"}, set()),
    (dict(projection="evidence"), set(), {"evidence_clamp"}),
    (dict(radial="none", mu=0.0, mu_r=0.0), {"radial_flow", "m_eq"}, set()),
    (dict(radial="own", mu=0.2, mu_r=0.1), set(), {"radial_flow", "mu_r"}),
    (dict(retract="geodesic"), {"projector"}, set()),
    (dict(kernel="gaussian", mu=0.0, eta_tk=0.9), {"sigma_t0"}, set()),
    (dict(kernel="gaussian", mu=0.0, lift=2, projection="evidence"), set(), {"radius", "tau", "sigma_t0"}),
]  # fmt: skip


def combination(number: int) -> tuple[dict, int, int]:
    """Settings, heads and groups of a drawn combination, or of a named one after them."""
    switches, other = draw(number)
    heads, groups = (1, 1) if number % 6 == 5 else (HEADS, other["groups"])
    fixed = dict(value_residual=False, tie_output=False, backend="reference", evidence_clamp=0.5)
    settings = switches | fixed | dict(mu=0.0 if number % 3 else 0.2, mu_r=other["mu_r"], widen_k=other["widen_k"])
    if number >= DRAWN:
        plain = dict(consensus="none", uncertainty="none", projection="global", retract="none", residual_form="full")
        plain |= dict(kernel="student", radial="none", radial_correlation="vv", magnitude="own", norm_values=True)
        changes = dict(NAMED[number - DRAWN][0])
        heads = groups = changes.pop("heads", HEADS)
        settings |= plain | dict(transport="rotary", irls_steps=1, norm_position="post", head_gate=False) | changes
    elif number % 2:  # noise that is given is matched to nothing
        settings |= dict(eta_tk=0.9) | (dict(sigma_t0=0.8) if number % 4 == 3 else {})
    if settings["mu"] == 0 and settings["mu_r"] == 0:
        settings["radial_flow"] = "decay"  # the other one is refused
    return settings, heads, groups


DRAWN = 12


@pytest.mark.parametrize("number", range(DRAWN + len(NAMED)))
def test_what_is_called_idle_changes_nothing_and_the_rest_does(number):
    settings, heads, groups = combination(number)
    print(f"POLARLM_ORACLE_SEED={SEED} combination {number}: {heads} heads, {settings}")
    expected, idle = output(settings, heads, groups)
    if number >= DRAWN:
        _, without, with_effect = NAMED[number - DRAWN]
        assert without <= idle and not with_effect & idle
    alternatives = OTHER | {name: next(w for w in words if w != settings[name]) for name, words in WORDS.items()}
    for name, value in alternatives.items():
        if (name == "mu" and settings["mu"] == 0) or (name == "radius" and settings["norm_position"] == "pre"):
            continue  # another rate is another kind of block; fresh weights of `pre` are drawn for their radius
        try:
            actual, idle_there = output(settings | {name: value}, heads, groups)
        except UserError:
            continue
        # Scalars are stored in fp32: noises that are matched have a common factor to seven digits.
        same = torch.allclose(actual, expected, rtol=1e-6, atol=1e-7)
        assert same == (name in idle and name in idle_there), f"block.{name}={value}: {'no' if same else 'an'} effect"
