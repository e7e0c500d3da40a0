"""What `inspect` tells adds up and is what the model really is."""

import torch

from polarlm.launch.inspect import (
    changed_settings,
    default_settings,
    describe_run,
    flops_parts,
    learned_scalars,
    memory_parts,
    parameter_parts,
    saved_bytes,
)
from tests.runs.made_up_run import made_up_run


def test_parts_add_up_to_the_whole(tmp_path):
    model = made_up_run(tmp_path / "run", "polar", tie_embeddings=False).model
    *parts, total = parameter_parts(model)
    assert sum(count for _, count, _ in parts) == total[1] == model.parameter_count()
    counts = {name: count for name, count, _ in parts}
    assert counts["embedding"] == counts["output"] == 257 * 32
    assert counts["feed-forward"] == sum(p.numel() for b in model.blocks for p in b.feed_forward.parameters())
    assert counts["scalars of the filter"] == sum(
        p.numel() for b in model.blocks for p in b.mixer.estimator.parameters()
    )
    *flops, everything = flops_parts(model, 24)
    assert sum(value for _, value in flops) == everything[1] == model.flops_per_token(24)
    *memory, whole = memory_parts(model, 2, model.config.context)
    assert sum(size for _, size in memory) == whole[1]
    assert dict(memory)["optimiser"] == 8 * model.parameter_count()


def test_activations_are_measured_and_grow_with_the_batch(tmp_path):
    model = made_up_run(tmp_path / "run").model
    one, two = (saved_bytes(model, rows, model.config.context) for rows in (1, 2))
    # At least the input of every matrix product of every layer is kept.
    assert one > 24 * 32 * 4 * 2 * 4
    assert 1.7 < two / one < 2.05  # tables and scalars are kept once
    assert not model.training


def test_scalars_are_told_per_layer_and_head_as_the_block_uses_them(tmp_path):
    run = made_up_run(tmp_path / "run", "polar")
    with torch.no_grad():
        run.model.blocks[1].mixer.estimator["nu_t"].raw.fill_(2.0)
    scalars = learned_scalars(run.model)
    expected = torch.nn.functional.softplus(torch.tensor(2.0)).item()
    assert scalars["nu_t"][1] == [expected] * 2 and abs(scalars["nu_t"][0][0] - 3.0) < 1e-5
    assert scalars["forget_bias"] == [[0.0, 0.0]] * 2
    assert learned_scalars(made_up_run(tmp_path / "other").model) == {}
    text = describe_run(run)
    assert "nu_t" in text and "layer 1" in text and "attention" in text and "optimiser" in text


def test_only_changed_settings_are_told():
    default, _ = default_settings({})
    assert changed_settings(default) == []
    _, polar = default_settings({"block": "polar"})
    polar["block"]["nu"] = 7.0
    polar["seed"] = 5
    changed = {key: new for key, _, new in changed_settings(polar)}
    assert changed == {"block": "polar", "block.nu": 7.0, "seed": 5}
