"""One small bug: a place in a file, what stands there, what would be wrong there, and the tests that must notice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


class Stale(Exception):
    """The text that a mutant replaces is no longer there, or no longer unique."""


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `file`; `tests` (files or single tests) must fail then."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    bug: str  # what goes wrong, in words

    @property
    def name(self) -> str:
        """Short and stable, for lists and --only."""
        return f"{Path(self.file).stem}-{hashlib.sha256(f'{self.file}{self.old}→{self.new}'.encode()).hexdigest()[:6]}"

    def applied(self, root: Path) -> str:
        """The file's text with the bug in it."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if self.old == self.new or text.count(self.old) != 1:
            raise Stale(f"{self.name}: {self.file} holds {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)

    def fingerprint(self, root: Path) -> str:
        """Changes when the bug, the file it is put into or a test that should notice it changes."""
        digest = hashlib.sha256(repr(self).encode())
        for name in (self.file, *(test.partition("::")[0] for test in self.tests)):
            path = root / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes() if file.is_file() else b"")
        return digest.hexdigest()[:16]
