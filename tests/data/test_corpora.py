"""The shipped corpora: what their yaml promise, on the real texts where these are present."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.data.config import read_data_config
from polarlm.data.corpus import find_damage
from polarlm.data.tokenizer import read_tokenizer_config
from polarlm.errors import UserError
from polarlm.launch.corpora import data_settings
from polarlm.locations import choices_of

NAMES = choices_of("data")


def prepared(choices: list[str], cache: Path) -> Corpus:
    data, tokenizer, _ = data_settings(choices)
    return build_corpus(data, tokenizer, cache)


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_corpus_has_valid_settings(name: str) -> None:
    # A mixture alone is refused: its parts are chosen with it.
    parts = ["+data@data.parts.code=pydocs", "++data.weights={code:1}"] if name == "mixture" else []
    data, tokenizer, _ = data_settings([f"data={name}", *parts])
    config = read_data_config(data)
    read_tokenizer_config(tokenizer)
    assert config.name == name
    assert config.hub is None or name == "hub" or len(config.hub.revision or "") == 40  # pinned


@pytest.mark.parametrize("name", ["byte", "char", "word", "bpe", "gpt2", "file"])
def test_every_shipped_tokenizer_has_valid_settings(name: str) -> None:
    kind = read_tokenizer_config(data_settings([f"tokenizer={name}"])[1]).kind
    assert kind == name or name == "gpt2"


def test_a_mistyped_corpus_lists_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"data=wiki2 does not exist\. Did you mean wikitext2.*c4, copying, enwik8"):
        data_settings(["data=wiki2"])


def test_corpora_without_files_say_what_is_missing(tmp_path: Path) -> None:
    for name in ("text", "jsonl", "parquet"):
        with pytest.raises(UserError, match=rf"data={name} has no text.*data.path"):
            prepared([f"data={name}"], tmp_path)
    with pytest.raises(UserError, match=r"data.hub.name is missing"):
        prepared(["data=hub"], tmp_path)


def train_a_little(corpus: Corpus) -> None:
    """Two steps of a small model on the corpus's batches, then its validation loss."""
    from polarlm.attention import StandardAttention
    from polarlm.model import GPT, GPTConfig

    model = GPT(
        GPTConfig(vocab_size=corpus.tokenizer.vocab_size, context=32, d_model=16, n_layer=1, n_head=2),
        partial(StandardAttention),
    )
    module = LMDataModule(corpus, context=32, micro_batch=4, seed=1, eval_tokens=200)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(2), module.train_dataloader()):
        loss = model.loss(batch["tokens"], batch["targets"])
        loss.backward()
        optimiser.step()
    for batch in module.val_dataloader():
        assert torch.isfinite(model.loss(batch["tokens"], batch["targets"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "tokens"),
    [
        (["data=wikitext2", "tokenizer=word"], {"train": 2_088_628, "val": 217_646}),
        (["data=shakespeare", "tokenizer=gpt2"], {"train": 301_966, "val": 36_059}),
        (["data=shakespeare", "tokenizer=char"], {"train": 1_003_854, "val": 111_540}),
        (["data=gutenberg", "tokenizer=byte"], {}),
        (["data=enwik8", "tokenizer=byte"], {"train": 18_000_000, "val": 1_000_000, "test": 1_000_000}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_real_corpora_prepare_verify_and_train(
    shared_data: Path, tmp_path: Path, choices: list[str], tokens: dict[str, int]
) -> None:
    corpus = prepared(choices, tmp_path)
    counted: dict[str, Any] = {split: len(corpus.store(split)) for split in corpus.splits}
    assert counted == tokens or (not tokens and counted["train"] > 15_000_000)
    assert find_damage(corpus, thorough=True) == {}
    if choices == ["data=wikitext2", "tokenizer=word"]:
        assert corpus.tokenizer.vocab_size == 33_278
    train_a_little(corpus)


def test_the_embedded_corpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = Path(tmp_path_factory.getbasetemp().parent) / "pydocs"  # extracted once for all test runs of a user
    corpus = prepared(["data=pydocs", "tokenizer=bpe"], cache)
    described = corpus.describe()
    assert described["splits"]["train"]["bytes"] > 800_000 and corpus.tokenizer.vocab_size == 2048
    for split in ("val", "test"):
        numbers = described["splits"][split]
        assert numbers["tokens"] > 10_000 and 2 < numbers["bytes_per_token"] < 5
        # Paragraphs are unique in the whole corpus, so none can leak.
        assert described["leakage"][split]["paragraphs"]["in_train"] == 0
    text = corpus.tokenizer.decode(corpus.store("train")[:200_000].tolist())
    assert ">>>" not in text and "::=" not in text and "Return" in text
