"""Who looked when: a comparison that was seen before its last seeds were trained is no fixed-size test any more.

`compare` notes every look in `.looks.json` beside the run folders: which pair of settings, on which number, with how
many seeds. Seeds that join later are then judged by the always-valid rule. A plan made before (`--seeds 5`) needs none
of this: until its seeds are there no verdict is given, and looks without a verdict cost nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from polarlm.runs.files import write_json
from polarlm.runs.reading import Run
from polarlm.verdict.groups import is_compared

FILE = ".looks.json"


class Looks:
    """The looks recorded beside the given runs; the empty record where there is none."""

    def __init__(self, *folders: Path) -> None:
        self.every_time = False  # a trial looks after every seed, also the first time
        self.path = folders[0] / FILE if folders else None  # where new looks are noted
        self.seen: dict[str, list[int]] = {}
        for folder in folders:
            for key, numbers in _read(folder / FILE).items():
                self.seen[key] = sorted({*self.seen.get(key, ()), *numbers})

    @classmethod
    def beside(cls, runs: Iterable[Run]) -> "Looks":
        """The records in the folders that hold the runs."""
        return cls(*dict.fromkeys(run.folder.parent for run in runs))

    def before(self, key: str, seeds: int) -> tuple[int, ...]:
        """Numbers of seeds, fewer than now, at which this comparison had a test that somebody saw."""
        if self.every_time:
            return tuple(range(1, max(seeds, 2)))
        return tuple(n for n in self.seen.get(key, ()) if 2 <= n < seeds)

    def record(self, looked: Mapping[str, int]) -> str | None:
        """Add looks; returns a sentence when they could not be written."""
        new = {key: sorted({*self.seen.get(key, ()), n}) for key, n in looked.items() if n >= 2}
        if not new or self.path is None or all(self.seen.get(k) == v for k, v in new.items()):
            return None
        self.seen |= new
        try:
            write_json(self.path, self.seen)
        except OSError as error:
            return f"This look could not be noted in {self.path} ({error.strerror}): later seeds will seem planned."
        return None


def _read(path: Path) -> dict[str, list[int]]:
    try:
        looks = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): [int(n) for n in numbers] for key, numbers in looks.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # absent or damaged: as if nobody had looked; the next look writes it again


def pair_key(ours: Run, theirs: Run, measure: str) -> str:
    """Equal for the same pair of settings on the same number, whatever else is on the page."""
    return f"{_settings(ours)}:{_settings(theirs)}:{measure}"


def _settings(run: Run) -> str:
    kept = {key: value for key, value in run.settings.items() if is_compared(key)}
    return hashlib.sha256(json.dumps([run.block, kept], sort_keys=True, default=str).encode()).hexdigest()[:16]
