"""The words that the command line allows for a block's switch are those that the block itself takes.

The schema is read before anything heavy is imported, so the two lists stand in two places; this test holds them equal.
"""

import dataclasses

import pytest
import torch

from polarlm.errors import UserError
from polarlm.launch.schema import BlockSettings
from polarlm.locations import shipped_default
from polarlm.model.build import build_model
from tests.contract.conftest import CLASSES

OTHER_SPELLINGS = {"on", "off"}  # what older files say
SIZES = {"d_model": 16, "n_layer": 1, "n_head": 2, "context": 8}


def words_of(name: str) -> set[str]:
    (field,) = (field for field in dataclasses.fields(BlockSettings) if field.name == name)
    return {word for word in field.metadata["choices"] if isinstance(word, str)} - OTHER_SPELLINGS


SWITCHES = [field.name for field in dataclasses.fields(BlockSettings) if "choices" in field.metadata]
PAIRS = [
    (block, name)
    for block in CLASSES
    for name in SWITCHES
    if words_of(name) and shipped_default(f"block.{name}", {"block": block}) is not None
]


def use(block: dict) -> None:
    """Build a model and let it read: a backend is looked at when it is used."""
    build_model({"model": SIZES, "block": block}, 9)(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(("block", "name"), PAIRS)
def test_a_block_names_the_words_of_the_schema_when_it_refuses_another(block, name):
    target = shipped_default("block._target_", {"block": block})
    with pytest.raises(UserError, match=f"block.{name} is 'sideways'") as refused:
        use({"_target_": target, name: "sideways"})
    listed = str(refused.value).rpartition("allowed: " if "allowed: " in str(refused.value) else "one of ")[2]
    assert set(listed.rstrip(".").split(", ")) == words_of(name)
