"""How the probe behaves: same names for all blocks, nothing touched, nothing invented."""

import json
from functools import partial

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from polarlm.attention import ExclusiveAttention, PolarAttention, StandardAttention
from polarlm.diagnostics import run_probe
from polarlm.model import GPT, GPTConfig
from tests.conftest import ROOT

BLOCKS = sorted(path.stem for path in (ROOT / "configs" / "block").glob("*.yaml"))
# What every block has; the report lays these side by side.
COMMON = {
    "radial/residual_rms", "radial/residual_rms_std", "radial/residual_rms_p99", "radial/residual_rms_first",
    "radial/growth", "radial/growth_attention", "radial/growth_ffn", "radial/growth_predicted", "radial/growth_latent",
    "radial/growth_latent_unprojected", "radial/growth_slope", "radial/growth_r2", "radial/growth_latent_slope",
    "radial/growth_latent_r2", "radial/magnitude", "radial/magnitude_std", "radial/magnitude_max",
    "radial/tangency_latent", "radial/tangency_attention", "radial/tangency_ffn", "radial/angular_step_latent",
    "radial/angular_step_attention", "radial/angular_step_ffn", "radial/resultant_length", "radial/spectral_mass",
    "radial/resistance_slope", "radial/resistance_r2", "radial/magnitude_loss_correlation",
    "precision/log_evidence", "precision/log_evidence_std", "precision/log_evidence_slope",
    "attention/entropy", "attention/effective_tokens", "attention/mass_first",
    "attention/mass_self", "attention/mass_largest", "attention/mean_lag", "attention/self_similarity",
    "attention/consensus_epsilon", "attention/consensus_broken", "attention/magnitude_correlation",
}  # fmt: skip


def model_of(mixer, **changes):
    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "context": 24, "d_model": 32, "n_layer": 3, "n_head": 4} | changes
    return GPT(GPTConfig(**sizes), mixer)


def shipped_model(block):
    """A small model of a block's yaml, in the residual frame that it names."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        section = dict(compose(f"block/{block}").block)
    frame = {"frame": section.pop("frame")} if "frame" in section else {}
    return model_of(instantiate(section), **frame).eval()


def tokens_of(batch=3, length=20):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_shipped_block_has_the_common_names(block):
    model = shipped_model(block)
    probe = run_probe(model, tokens_of())
    assert set(probe.values) >= COMMON
    assert probe.layers == 3 and probe.heads in (1, 4)  # the printed algorithm has one head whatever the model
    assert ("precision/log_evidence_spread" in probe.values) == (probe.heads > 1)
    assert len(probe.values["radial/residual_rms"]) == 4
    row = json.loads(json.dumps(probe.row(5, 640), allow_nan=False))
    assert (row["step"], row["tokens"], row["layers"], row["heads"]) == (5, 640, 3, probe.heads)
    for name, value in probe.values.items():
        per_head = [entry if isinstance(entry, list) else [entry] for entry in value]
        assert all(len(entry) in (1, probe.heads) for entry in per_head), name
    assert all(count is not None for count in probe.values["attention/entropy"][0])


def test_flat_names_carry_layer_and_head():
    scalars = run_probe(model_of(partial(PolarAttention, radial="own")), tokens_of()).scalars()
    assert {"radial/residual_rms/layer_03", "radial/growth/layer_02", "precision/log_evidence/layer_02/head_1",
            "parameters/mu/layer_00/head_3", "parameters/beta/layer_01"} <= set(scalars)  # fmt: skip
    assert all(value is None or isinstance(value, float) for value in scalars.values())


def test_what_a_block_does_not_have_is_absent():
    probe = run_probe(model_of(StandardAttention), tokens_of())
    absent = ("parameters/", "radial/delta_m", "attention/removed_share", "precision/robust", "precision/outlier")
    assert not [name for name in probe.values if name.startswith(absent)]
    assert set(probe.profiles) == {"attention/weight"}
    off = run_probe(model_of(partial(PolarAttention, radial="none", projection="none")), tokens_of())
    absent = ("radial/delta_m", "attention/removed_share", "parameters/beta")
    assert not [name for name in off.values if name.startswith(absent)]


def test_layers_that_differ_are_told_apart():
    probe = run_probe(model_of(partial(ExclusiveAttention, layers=[1])), tokens_of())
    share = probe.values["attention/removed_share"]
    assert share[0] == share[2] == [None] * 4 and all(value > 0 for value in share[1])


def test_the_probe_touches_nothing():
    model = model_of(PolarAttention, dropout=0.3).train()
    model.blocks[1].eval()  # a part someone froze on purpose
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    first = run_probe(model, tokens_of())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.blocks[0].mixer.training and not model.blocks[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert run_probe(model, tokens_of()) == first


def test_packed_documents_are_probed_like_separate_ones():
    model, tokens = model_of(PolarAttention, context=40), tokens_of(2, 20)
    apart = run_probe(model, tokens).scalars()
    documents = torch.arange(2).repeat_interleave(20).unsqueeze(0)
    packed = run_probe(model, tokens.reshape(1, 40), documents).scalars()
    exempt = ("radial/residual_rms_first",)  # the first token of a row, not of a document
    for name, value in apart.items():
        if not name.startswith(exempt):
            assert packed[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_one_head_has_no_spread_over_heads():
    probe = run_probe(model_of(StandardAttention, n_head=1), tokens_of())
    assert "precision/log_evidence_spread" not in probe.values


def test_a_single_token_sequence_is_probed():
    probe = run_probe(model_of(PolarAttention), tokens_of(2, 1))
    assert probe.values["attention/entropy"][0] == [0.0] * 4


def test_bf16_model_gives_finite_statistics():
    probe = run_probe(model_of(StandardAttention).bfloat16(), tokens_of())
    assert all(value is not None for value in probe.values["radial/residual_rms"])


def test_statistics_of_a_mixed_precision_run_are_taken_in_full_precision():
    model, tokens = model_of(StandardAttention), tokens_of()
    with torch.autocast("cpu", torch.bfloat16):
        probe = run_probe(model, tokens)
        records = []
        with torch.no_grad():
            model.eval()(tokens, record=records)
    weights, v, v_bar = (records[0][name].double() for name in ("weights", "v", "v_bar"))
    length = v_bar.norm(dim=-1) / (weights @ v.norm(dim=-1, keepdim=True)).squeeze(-1)
    assert probe.values["radial/resultant_length"][0] == pytest.approx(length.mean((0, 2)).tolist(), rel=1e-5)
    assert weights.sum(-1).sub(1).abs().max() < 1e-5


def test_histograms_count_every_token():
    probe = run_probe(model_of(StandardAttention), tokens_of(3, 20))
    assert [sum(h.counts) for h in probe.histograms["radial/magnitude"]] == [60] * 3
    assert sum(probe.histograms["precision/log_evidence"][0].counts) == 60 * 4
