"""The list of small bugs, by what they break: a table per area, as yaml.

- file: where the bug is put in
  tests: [the files or single tests that must notice it]
  bugs:
  - bug: what goes wrong, in words
    old: what stands there now, once
    new: what stands there then
    tests: [those that must notice this one, where the others of the place are slow]
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.mutants.mutant import Mutant

AREAS = ("geometry", "attention", "model", "training", "data", "verdict", "paper", "theory")


def read_area(area: str) -> Iterator[Mutant]:
    """The bugs of one table."""
    path = Path(__file__).with_name(f"{area}.yaml")
    for place in yaml.safe_load(path.read_text(encoding="utf-8")):
        for bug in place["bugs"]:
            yield Mutant(place["file"], bug["old"], bug["new"], tuple(bug.get("tests") or place["tests"]), bug["bug"])


ALL = [mutant for area in AREAS for mutant in read_area(area)]
