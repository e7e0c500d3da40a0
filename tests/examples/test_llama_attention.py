"""examples/llama_attention.py runs: a Hugging Face Llama trains and generates with polar attention."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama_attention.py"


def test_a_llama_learns_with_polar_attention():
    transformers = pytest.importorskip("transformers")
    names = runpy.run_path(str(EXAMPLE))
    losses = names["main"](steps=12)
    assert losses[-1] < losses[0] - 1
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = names["exchange_attention"](transformers.LlamaForCausalLM(config)).eval()
    tokens = torch.arange(6)[None]
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 9)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=tokens, use_cache=True)
