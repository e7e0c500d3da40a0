"""Layers that are recomputed in the backward pass stay in one compiled graph, also those that share values."""

import pytest
import torch

from polarlm.model.build import build_model
from tests.training.tiny_jobs import composed

SHARING = [("block=standard", "block.value_residual=true"), ("block=polar_uncertainty",)]


@pytest.mark.parametrize("overrides", SHARING, ids=["value_residual", "uncertainty"])
def test_recomputed_layers_that_share_values_compile_without_a_graph_break(tmp_path, overrides):
    """They changed a dictionary outside of the recomputed part, which made torch.compile give up on it."""
    config = composed(tmp_path, "model.n_layer=3", "model.checkpointing=true", *overrides)
    model = build_model(config, 64).train()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens).backward()
    eager = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model.loss, backend="aot_eager", fullgraph=True)(tokens, tokens).backward()
    for parameter, gradient in zip(model.parameters(), eager):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
