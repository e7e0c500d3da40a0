"""A default stands in the yaml and in the schema; both say the same."""

from dataclasses import asdict, fields

import yaml

from polarlm.data.config import DataConfig, read_data_config
from polarlm.data.tokenizer import TokenizerConfig, read_tokenizer_config
from polarlm.launch.corpora import data_settings
from polarlm.locations import CONFIGS


def test_the_common_yaml_and_the_schema_agree() -> None:
    shipped = yaml.safe_load((CONFIGS / "data" / "common" / "base.yaml").read_text())
    defaults = asdict(DataConfig())
    assert {key: defaults[key] for key in shipped} == shipped
    # What is not there has no meaning for every corpus: it belongs to the yaml of a kind of source.
    special = {"local", "url", "sha256", "hub", "mqar", "permutations", "copying", "induction", "parts", "weights"}
    assert {field.name for field in fields(DataConfig)} - shipped.keys() == special


def test_a_key_left_out_is_the_yaml_of_its_corpus() -> None:
    assert read_data_config(data_settings(["data=text"])[0]) == DataConfig()


def test_the_tokenizer_yaml_and_the_schema_agree() -> None:
    defaults = asdict(TokenizerConfig())
    for name in ("bpe", "file", "gpt2"):
        shipped = data_settings([f"tokenizer={name}"])[1]
        chosen = {"kind", "vocab_size", "hub", "revision", "local"}  # what the choice is about
        assert {k: v for k, v in shipped.items() if k not in chosen} == {
            k: list(defaults[k]) if isinstance(defaults[k], tuple) else defaults[k] for k in shipped if k not in chosen
        }
        assert read_tokenizer_config(shipped).kind == shipped["kind"]
