"""Content transport (Appendix G.2) through the block: limits, the pairwise definition, decoding, documents, flow."""

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, TokenContext
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.geometry.content_transport import cumulative_transport, local_step
from polarlm.geometry.transport import rotary_frequencies, to_complex, to_real
from polarlm.model import GPT, GPTConfig

WIDTH = 32
SHAPE = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=2, head_dim=8, layer=0, n_layer=2)
CONTENT = ["phases", "unitary"]


def mixer_of(transport, stirred=True, **switches):
    torch.manual_seed(1)
    mixer = PolarAttention(SHAPE, transport=transport, **switches)
    if stirred and mixer.transport is not None:
        torch.nn.init.normal_(mixer.transport.angles.weight, std=0.3)
    return mixer


def run(mixer, x, record=None):
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim, dtype=x.dtype)
    return mixer(x, TokenContext(tables, record=record, positions=torch.arange(x.shape[1])))


@pytest.mark.parametrize("frequencies", ["shared", "learned"])
@pytest.mark.parametrize("transport", CONTENT)
def test_t5_without_angles_it_is_rope_bit_for_bit(transport, frequencies):
    x = torch.randn(2, 70, WIDTH)  # longer than a chunk
    with torch.no_grad():
        plain, fresh, led = (
            run(mixer_of(kind, stirred, frequencies=frequencies), x)
            for kind, stirred in (("rotary", False), (transport, False), (transport, True))
        )
    assert torch.equal(fresh, plain)
    assert (led - plain).abs().max() > 0.01


@pytest.mark.parametrize("transport", CONTENT)
def test_t5_estimates_are_sums_of_pairwise_transported_values(transport):
    """v_bar_i = sum_j A_ij Phi(i, j) v_j with Phi(i, j) = R_i ... R_{j+1} multiplied out, and so for the scores."""
    x, record = torch.randn(1, 11, WIDTH, dtype=torch.float64), {}
    switches = dict(kernel="exponential", mu=0.0, m_inf=0.0, radial="none", forgetting="none")
    mixer = mixer_of(transport, **switches).double()
    run(mixer, x, record)
    frequencies = rotary_frequencies(8, dtype=torch.float64)
    for h in range(4):
        g = h // 2
        if transport == "unitary":
            axes, angles = mixer.transport.axes(x)[0].view(11, 2, 8)[:, g], mixer.transport.angles(x)[0, :, g]
            steps = local_step(-frequencies.expand(11, -1), axes, angles)  # RoPE's sign
        else:  # a token adds its angles to RoPE's, and there is no rank-one part
            phases = frequencies + mixer.transport.angles(x)[0].view(11, 2, 4)[:, g]
            steps = local_step(-phases, torch.ones(11, 8, dtype=x.dtype), torch.zeros(11, dtype=x.dtype))
        frames = cumulative_transport(steps)
        v, k, q = (to_complex(record[name][0, n]) for name, n in (("v", g), ("k", g), ("q", h)))
        for i in range(11):
            moved = [frames[i] @ frames[j].mH for j in range(i + 1)]
            weights = record["weights"][0, h, i, : i + 1]
            expected = sum(a * to_real(turn @ v[j]) for a, turn, j in zip(weights, moved, range(i + 1)))
            torch.testing.assert_close(record["v_bar"][0, h, i], expected)
            scores = torch.stack([-(q[i] - turn @ k[j]).abs().square().sum() for j, turn in enumerate(moved)])
            tilde = record["log_kappa_tilde"][0, h, i, : i + 1].exp() / 4 / record["params"]["tau"][h]
            expected = (scores * tilde + record["log_kappa"][0, h, i, : i + 1]).softmax(0)
            torch.testing.assert_close(weights, expected)


def test_t6_half_a_turn_is_a_householder_reflection():
    """Without rotation and with phi = pi, a token reflects what passes it (PaTH at beta = 2); twice is not at all."""
    mixer = mixer_of("unitary").double()
    axis = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, 3, WIDTH)
    angles = mixer.transport.angles.weight
    with torch.no_grad():  # the same token three times: every angle pi, every axis the same
        angles.copy_(torch.pi * axis[0, :1] / axis[0, 0].square().sum())
    still = (torch.ones(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64))
    turns = mixer.frequencies(TokenContext(still))
    mixer.frequencies.base = float("inf")  # frequencies 1, 0, 0, 0; the first mode is taken back below
    mixer.frequencies.one_step = lambda dtype, device: (still[0][:1], still[1][:1])
    frame = mixer.transport(axis, turns, mixer.frequencies, None)
    k = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    _, entered = frame.enter(torch.zeros(1, 4, 3, 8, dtype=torch.float64), k)
    unit = torch.nn.functional.normalize(mixer.transport.axes(axis)[0].view(3, 2, 8).transpose(0, 1), dim=-1)
    u, z = to_complex(unit), to_complex(k[0])
    reflected = to_real(z - 2 * u * (u.conj() * z).sum(-1, keepdim=True))
    torch.testing.assert_close(entered[0, :, 0], reflected[:, 0])
    torch.testing.assert_close(entered[0, :, 1], k[0, :, 1])
    torch.testing.assert_close(entered[0, :, 2], reflected[:, 2])


@pytest.mark.parametrize("transport", CONTENT)
def test_lengths_and_products_survive_a_long_text(transport):
    mixer, x = mixer_of(transport), torch.randn(1, 700, WIDTH)
    record = {}
    with torch.no_grad():
        run(mixer, x, record)
        turns = mixer.frequencies(TokenContext(rotary_tables(torch.arange(700), 8)))
        frame = mixer.transport(x, turns, mixer.frequencies, None)
        q, k = torch.randn(1, 4, 700, 8), torch.randn(1, 2, 700, 8)
        q_common, k_common = frame.enter(q, k)
        torch.testing.assert_close(k_common.norm(dim=-1), k.norm(dim=-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(frame.leave(q_common), q, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("transport", CONTENT)
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_decoding_documents_and_gradients(transport, kv_heads):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, context=160, d_model=WIDTH, n_layer=2, n_head=4, n_kv_head=kv_heads)
    model = GPT(config, lambda shape: PolarAttention(shape, transport=transport, frequencies="learned"))
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.transport.angles.weight, std=0.3)
    text = torch.randint(0, 31, (1, 140))
    model.loss(text[:, :-1], text[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(block.mixer.transport.angles.weight.grad.abs().max() > 0 for block in model.blocks)
    with torch.no_grad():
        whole, cache = model(text), model.new_cache(1, 140)
        pieces = torch.cat([model(part, cache=cache) for part in text.split([70, 1, 68, 1], dim=1)], dim=1)
        torch.testing.assert_close(pieces, whole, atol=2e-4, rtol=2e-4)
        ids = torch.tensor([[4] * 66 + [9] * 74])
        packed = model(text, documents=ids)
        alone = torch.cat([model(part) for part in text.split([66, 74], dim=1)], dim=1)
        torch.testing.assert_close(packed, alone, atol=2e-4, rtol=2e-4)


def test_content_costs_flops():
    cost = {kind: mixer_of(kind).flops_per_token(64) for kind in ("rotary", "phases", "unitary")}
    assert cost["phases"] == cost["rotary"] + 2 * WIDTH * 2 * 4
    modes, vectors = 4, 12  # q and v_bar of four heads, k and v of two
    products = 8 * (2 * (16 * modes + 2 * modes**2) + vectors * (16 * modes + modes**2))
    assert cost["unitary"] == cost["rotary"] + 2 * WIDTH * 2 * (8 + 1) + products


def test_e19_magnitudes_flow_to_their_equilibrium():
    """With m_eq, far tokens count as if their magnitude were m_eq; near ones as what they are."""
    x = torch.randn(1, 90, WIDTH)
    record = {}
    noise = dict(mu=0.5, mu_spread=False, m_inf=0.0, sigma_t0=1.0)
    mixer = mixer_of("rotary", radial_flow="equilibrium", m_eq=2.0, **noise)
    run(mixer, x, record)
    p, m = record["params"], record["magnitude"][0]
    kappa = record["log_kappa"][0, 0].exp()
    torch.testing.assert_close(kappa[89, 89], m[89] ** 2 / (p["eta_tk"][0] ** 2 + 1))
    torch.testing.assert_close(kappa[89, :20], torch.full((20,), 4.0), rtol=1e-3, atol=0)
    assert p["m_eq"] == 2.0 and mixer.estimator["m_eq"].raw.requires_grad


def test_a_flow_without_a_rate_is_refused():
    with pytest.raises(UserError, match=r"block/precision=equilibrium moves .* block.mu, which is 0"):
        PolarAttention(SHAPE, radial_flow="equilibrium", mu=0.0)
    with pytest.raises(UserError, match="rotary, phases, unitary"):
        PolarAttention(SHAPE, transport="rope")
