"""The baseline is right: our standard GPT computes what an independent Llama computes, logits and gradients."""

import pytest
import torch
import torch.nn.functional as F

from polarlm.attention import StandardAttention
from polarlm.model import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

VOCAB = 97


def llama_like(model: GPT, fill) -> torch.nn.Module:
    """A transformers Llama of the same shape; `fill(target, source)` is called for every pair of weights."""
    c = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_size,
            intermediate_size=model.blocks[0].feed_forward.hidden,
            rms_norm_eps=c.norm_eps,
            max_position_embeddings=c.context,
            tie_word_embeddings=c.tie_embeddings,
            rope_theta=c.rope_base,
            attn_implementation="eager",
        )
    )
    pairs(model, llama, lambda ours, theirs: fill(theirs, ours))
    return llama


def pairs(model: GPT, llama: torch.nn.Module, visit) -> None:
    """Visit (our slice of a weight, their weight) for every weight, as callables on parameter or gradient."""
    c = model.config
    visit(lambda get: get(model.embedding.weight), llama.model.embed_tokens.weight)
    visit(lambda get: get(model.norm.weight), llama.model.norm.weight)
    visit(lambda get: get(model.head.weight), llama.lm_head.weight)
    sizes = [c.n_head * c.head_size, c.kv_heads * c.head_size, c.kv_heads * c.head_size]
    for ours, theirs in zip(model.blocks, llama.model.layers, strict=True):
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            weight = getattr(theirs.self_attn, name).weight
            visit(lambda get, o=ours, i=index: get(o.mixer.qkv.weight).split(sizes)[i], weight)
        for index, name in enumerate(("gate_proj", "up_proj")):
            weight = getattr(theirs.mlp, name).weight
            visit(lambda get, o=ours, i=index: get(o.feed_forward.gate_up.weight).chunk(2)[i], weight)
        visit(lambda get, o=ours: get(o.mixer.out.weight), theirs.self_attn.o_proj.weight)
        visit(lambda get, o=ours: get(o.feed_forward.down.weight), theirs.mlp.down_proj.weight)
        visit(lambda get, o=ours: get(o.mixer_norm.weight), theirs.input_layernorm.weight)
        visit(lambda get, o=ours: get(o.ffn_norm.weight), theirs.post_attention_layernorm.weight)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="llama"),
        pytest.param({"n_kv_head": 2}, id="grouped-query"),
        pytest.param(
            {"n_kv_head": 1, "head_dim": 24, "tie_embeddings": False, "rope_base": 500.0}, id="untied-wide-mqa"
        ),
    ],
)
def test_standard_gpt_equals_transformers_llama(shape: dict) -> None:
    config = GPTConfig(vocab_size=VOCAB, context=64, d_model=64, n_layer=3, n_head=4, **shape)
    model = GPT(config, StandardAttention)
    with torch.no_grad():  # far from the initial symmetry: gains differ from 1, scores from 0
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embedding" in name or "head" in name:
                parameter.mul_(6.0)
            assert parameter.numel(), name
    llama = llama_like(model, lambda theirs, ours: theirs.data.copy_(ours(lambda p: p.data)))

    tokens = torch.randint(0, VOCAB, (3, 40))
    ours, theirs = model(tokens), llama(tokens).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    targets = torch.randint(0, VOCAB, (3, 40))
    model.loss(tokens, targets).backward()
    F.cross_entropy(theirs.flatten(0, 1), targets.flatten()).backward()
    pairs(model, llama, lambda o, t: torch.testing.assert_close(o(lambda p: p.grad), t.grad, atol=1e-5, rtol=1e-4))
