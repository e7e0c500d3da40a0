"""Standard, XSA and RFA equal an independent transcription, for switch combinations drawn anew from a printed seed."""

import random

import numpy as np
import pytest
import torch

from polarlm.attention import (
    ExclusiveAttention,
    MixerShape,
    RobustFilterAttention,
    StandardAttention,
    TokenContext,
)
from polarlm.attention.additions import FIRST_VALUES
from polarlm.attention.rfa import SLOWEST_DECAY
from polarlm.geometry import rotary_tables
from polarlm.model.gpt import document_positions
from tests.attention.oracle_baselines import robust_filter_attention, standard_attention
from tests.seeds import drawn_seed

WIDTH, HEADS, TOKENS, BASE, LAYER = 16, 4, 7, 100.0, 1
SEED = drawn_seed("POLARLM_ORACLE_SEED")
COMMON = {
    "qk_norm": [True, False],
    "rotate_values": [True, False],
    "frequencies": ["shared", "per_head", "learned"],
    "head_gate": [True, False],
    "value_residual": [True, False],
}
RFA = COMMON | {
    "kernel": ["student", "student_mle", "exponential", "gaussian"],
    "decay_keys": [True, False],
    "decay_values": [True, False],
    "backend": ["auto", "reference"],
}
DOCUMENTS = torch.tensor([[5, 5, 5, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1]])


def draw(switches: dict, name: str) -> tuple[dict, int, bool, float]:
    """(switches, key heads, packed documents?, decay of the first head) of one combination."""
    generator = random.Random(f"{SEED}/{name}")
    chosen = {key: generator.choice(values) for key, values in switches.items()}
    print(f"POLARLM_ORACLE_SEED={SEED} {name}: {chosen}")
    return chosen, generator.choice([4, 2]), generator.random() < 0.3, generator.choice([0.0, 0.03])


def stirred(mixer, number: int):
    torch.manual_seed(number)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.double()


def both(mixer, packed: bool, expected) -> tuple[np.ndarray, np.ndarray]:
    """The mixer's output and expected(x, weights, documents, first values), row by row."""
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    positions = document_positions(DOCUMENTS) if packed else torch.arange(TOKENS)
    rotary = rotary_tables(positions, mixer.rotary_dim, BASE, dtype=torch.float64)
    groups, size = mixer.shape.n_kv_head, mixer.shape.head_dim
    first = torch.randn(2, groups, TOKENS, size, dtype=torch.float64)
    context = TokenContext(rotary, DOCUMENTS if packed else None, positions=positions, shared={FIRST_VALUES: first})
    with torch.no_grad():
        actual = mixer(x, context).numpy()
    weights = {name.removesuffix(".weight"): value.numpy() for name, value in mixer.state_dict().items()}
    weights["log_frequency"] = weights.get("frequencies.log_frequency")
    weights["gate"], weights["share"] = weights.get("head_gate"), weights.get("value_residual.share")
    wanted = []
    for row in range(2):
        ids = DOCUMENTS[row].tolist() if packed else [0] * TOKENS
        shape = dict(
            heads=HEADS, groups=groups, base=BASE, documents=ids, first_values=first[row].transpose(0, 1).numpy()
        )
        wanted.append(expected(x[row].numpy(), weights, shape))
    return actual, np.stack(wanted)


@pytest.mark.parametrize("number", range(20))
def test_standard_and_xsa_are_their_formulas(number):
    switches, groups, packed, _ = draw(COMMON, f"standard {number}")
    exclusive = number % 2 == 1
    shape = MixerShape(WIDTH, HEADS, groups, WIDTH // HEADS, layer=LAYER, n_layer=3, rope_base=BASE)
    mixer = stirred((ExclusiveAttention if exclusive else StandardAttention)(shape, **switches), number)
    s = switches | {"exclusive": exclusive}
    actual, wanted = both(mixer, packed, lambda x, weights, rest: standard_attention(x, weights, s, **rest))
    np.testing.assert_allclose(actual, wanted, rtol=1e-8, atol=1e-10 * np.abs(wanted).max())


@pytest.mark.parametrize("number", range(30))
def test_rfa_is_appendix_a(number):
    switches, groups, packed, slowest = draw(RFA, f"rfa {number}")
    shape = MixerShape(WIDTH, HEADS, groups, WIDTH // HEADS, layer=LAYER, n_layer=3, rope_base=BASE)
    scalars = dict(nu=[1.0, 2.0, 3.0, 50.0], tau=0.8, sigma_process=[0.3, 0.2, 0.1, 0.5])
    mixer = stirred(RobustFilterAttention(shape, mu=[slowest, 0.05, 0.2, 1.0], **scalars, **switches), number)
    p = {name: value.detach().double().numpy() for name, value in mixer.estimator.read().items()}
    p["mu"] = np.maximum(p["mu"], SLOWEST_DECAY)  # what a head without decay has instead
    actual, wanted = both(mixer, packed, lambda x, w, rest: robust_filter_attention(x, w, p, switches, **rest))
    np.testing.assert_allclose(actual, wanted, rtol=1e-7, atol=1e-9 * np.abs(wanted).max())
