"""The byte, character and word tokenizers as a standard tokenizer.json, so that other programs can read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, WordTokenizer


def standard_bytes(tokenizer: ByteTokenizer, eos: str) -> str:
    """A byte-level BPE without merges is a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from polarlm.data.tokenizers.bpe import unicode_to_byte

    library = Tokenizer(models.BPE(dict(unicode_to_byte()), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([eos])
    assert library.token_to_id(eos) == tokenizer.eos_id
    return library.to_str()


def standard_characters(tokenizer: CharTokenizer) -> str:
    """Every character is a word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({c: i for i, c in enumerate(tokenizer.alphabet)}, unk_token=""))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library.to_str()


def standard_words(tokenizer: WordTokenizer) -> str:
    """White-space words, line ends as `<eos>`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    library = Tokenizer(models.WordLevel({w: i for i, w in enumerate(tokenizer.words)}, unk_token="<unk>"))
    library.normalizer = normalizers.Replace("\n", " <eos> ")
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library.to_str()
