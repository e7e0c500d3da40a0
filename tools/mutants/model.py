"""Bugs in the model, its loss and what is counted on a text."""

# ruff: noqa: E501
# fmt: off
from tools.mutants.mutant import mutants

M = "polarlm/model/"
E = "polarlm/evaluation/"
T = "tests/model/"

MUTANTS = [
    *mutants(
        f"{M}block.py",
        f"{T}test_block.py",
        ("middle = x + self.dropout(self.mixer(self.mixer_norm(x), context))", "middle = x + self.mixer(self.mixer_norm(x), context)", "residual dropout is missing after the mixer"),
        ("after = middle + self.dropout(self.feed_forward", "after = middle + (self.feed_forward", "residual dropout is missing after the feed-forward half"),
        ("after = middle + self.dropout(self.feed_forward(self.ffn_norm(middle)))", "after = x + self.dropout(self.feed_forward(self.ffn_norm(middle)))", "the mixer's step is forgotten"),
    ),
    *mutants(
        f"{M}block.py",
        f"{T}test_gpt.py",
        ("middle = self.mixer_norm(x + self.dropout(self.mixer(x, context)))", "middle = x + self.dropout(self.mixer(x, context))", "post-norm forgets its first norm"),
    ),
    *mutants(
        f"{M}block.py",
        f"{T}test_llama_parity.py",
        ("self.feed_forward(self.ffn_norm(middle))", "self.feed_forward(middle)", "the feed-forward half reads the raw stream"),
    ),
    *mutants(
        f"{M}feed_forward.py",
        f"{T}test_gpt.py {T}test_llama_parity.py",
        ("self.down(F.silu(gate) * up)", "self.down(F.gelu(gate) * up)", "SwiGLU with GELU"),
        ("int(mult * d_model * 2 / 3)", "int(mult * d_model)", "SwiGLU half as large again as GELU"),
    ),
    *mutants(
        f"{M}gpt.py",
        f"{T}test_gpt.py tests/contract/test_block_contract.py::test_cached_decoding_equals_the_full_forward",
        ("start = cache.length if cache is not None else 0", "start = 0", "decoding starts every token at position 0"),
        ("        x = self.dropout(x)\n", "", "no dropout on the embedding"),
        ("if self.config.frame == \"post\":", "if False:", "the first post-norm block gets a raw stream"),
        ("return index - torch.where(first, index, 0).cummax(dim=1).values", "return index", "positions run on across documents"),
    ),
    *mutants(
        f"{M}loss.py",
        f"{T}test_loss.py",
        ("return total / (flat != IGNORED).sum().clamp_min(1)", "return total / flat.numel()", "the mean counts ignored targets"),
        ("logits.scatter_add_(1, targets.clamp_min(0)[:, None], -one_hot[:, None])", "logits.scatter_add_(1, targets.clamp_min(0)[:, None], one_hot[:, None])", "the gradient of the loss with a sign turned"),
        ("return logits.mul_((one_hot if scale is None else one_hot * scale)[:, None])", "return logits.mul_(one_hot[:, None])", "the tokens' own gradients are ignored"),
    ),
    *mutants(
        f"{M}loss.py",
        "tests/model/test_loss.py tests/evaluation/test_tally.py",
        ("hits += ((picked > others) & (y != IGNORED)).sum()", "hits += ((picked >= others) & (y != IGNORED)).sum()", "a tie counts as a hit"),
        ("hits += ((picked > others) & (y != IGNORED)).sum()", "hits += (picked > others).sum()", "ignored targets count as hits"),
    ),
    *mutants(
        f"{M}norm.py",
        f"{T}test_llama_parity.py {T}test_gpt.py",
        ("self.weight.to(wide), self.eps)", "self.weight.to(wide), 0.1)", "another ε in every norm"),
    ),
    *mutants(
        f"{E}metrics.py",
        "tests/evaluation/test_metrics.py",
        ("return loss(tally) / math.log(2) / per_token", "return loss(tally) / per_token", "bits per byte without ln 2"),
        ("per_token = tally.text.bytes / tally.text.tokens if", "per_token = tally.text.characters / tally.text.tokens if", "bits per character called bits per byte"),
        ("return loss(tally) / (units / tally.text.tokens) if", "return tally.nats / units if", "words and characters without the tokens that were no target"),
        ("return math.exp(nats) if not nats >= 700 else math.inf", "return 2**nats if not nats >= 700 else math.inf", "perplexity with base 2"),
    ),
    *mutants(
        f"{E}tally.py",
        "tests/evaluation/test_tally.py",
        ("(targets != IGNORED).sum().double()", "torch.tensor(targets.numel()).double()", "ignored targets are counted in the mean"),
        ("    model.eval()\n", "    pass\n", "dropout acts during evaluation"),
    ),
    *mutants(
        f"{E}windows.py",
        "tests/evaluation/test_protocols.py",
        ("scored, begin = end, begin + stride", "scored, begin = begin + stride + 1, begin + stride", "overlapping windows score tokens twice"),
        ("end = min(begin + context + 1, length)", "end = min(begin + context, length)", "a window scores one token less than it could"),
    ),
    *mutants(
        "polarlm/evaluation/generate.py",
        "tests/evaluation/test_generate.py",
        ("logits = logits / (sampling.temperature or 1.0)", "logits = logits * (sampling.temperature or 1.0)", "temperature works the wrong way round"),
        ("order[mass_before >= sampling.top_p]", "order[mass_before > 2 * sampling.top_p]", "top-p keeps too much"),
    ),
]
