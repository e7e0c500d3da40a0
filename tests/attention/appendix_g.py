"""What the tests of Appendix G share: one Polar mixer or a small model, run with switches, and its record."""

import numpy as np
import torch

from polarlm.attention import MixerShape, PolarAttention, TokenContext
from polarlm.diagnostics import run_probe
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig

LENGTH, WIDTH = 9, 32
SHAPE = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=4, head_dim=8, layer=0, n_layer=2)


def run(x, seed=3, context=None, shape=SHAPE, **switches):
    torch.manual_seed(seed)
    mixer = PolarAttention(shape, **{"forgetting": "none"} | switches).to(x.dtype)  # the paper has none
    record: dict = {}
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim, dtype=x.dtype)
    positions = torch.arange(x.shape[1])
    out = mixer(x, TokenContext(tables, record=record, positions=positions, shared=context or {}))
    return out.detach(), record


def stream(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def model_of(block=PolarAttention, frame="pre", **switches):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, context=16, d_model=WIDTH, n_layer=3, n_head=4, frame=frame)
    return GPT(config, lambda shape: block(shape, **switches))


def probed(**switches):
    """(probe's values, parameters and record of every layer in numpy) of one model."""
    model, tokens, record = model_of(**switches), torch.randint(0, 31, (2, 10)), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model(tokens, record=record)
    numbers = [{k: v.double().numpy() for k, v in layer.items() if torch.is_tensor(v)} for layer in record]
    scalars = [{k: v.detach().double().numpy() for k, v in layer["params"].items()} for layer in record]
    return run_probe(model, tokens).values, scalars, numbers


def turned_values(seen):
    """Values as their common frame has them: every mode turned by its angle times the position."""
    v, cos, sin = seen["v"], seen["rotary_cos"], seen["rotary_sin"]
    real, imaginary = np.split(v, 2, axis=-1)
    return np.concatenate((real * cos - imaginary * sin, real * sin + imaginary * cos), axis=-1)
