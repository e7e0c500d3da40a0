"""How far preparing a corpus has come: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

_QUIET_SECONDS = 10.0


class PrepareProgress:
    """Documents, MB/s, tokens and time left; `advance` is called once per chunk of text."""

    def __init__(self, name: str, expected_bytes: int | None):
        self.name, self.expected = name, expected_bytes
        self.documents = self.bytes = self.tokens = 0
        self._begin = self._spoken = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PrepareProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[line]}")]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"preparing {self.name}", total=self.expected, line="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error[0] is None and (self._bar is not None or self.bytes > 50e6):
            self.expected = None  # nothing is left
            print(f"prepared {self.name}: {self.line()}", file=sys.stderr)

    def advance(self, documents: int, size: int, tokens: int) -> None:
        """Count one finished chunk."""
        self.documents += documents
        self.bytes += size
        self.tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.bytes, line=self.line())
        elif now - self._spoken > _QUIET_SECONDS:
            self._spoken = now
            print(f"preparing {self.name}: {self.line()}", file=sys.stderr, flush=True)

    def tokens_left(self) -> int | None:
        """How many more tokens the rest of the text will give, judged by what was read; None where nobody knows."""
        if not self.expected or not self.bytes:
            return None
        return int(max(self.expected - self.bytes, 0) / self.bytes * self.tokens)

    def line(self) -> str:
        """The numbers as one line of text."""
        seconds = max(time.monotonic() - self._begin, 1e-6)
        speed = self.bytes / seconds
        text = f"{self.documents:,} documents, {self.tokens:,} tokens, {speed / 1e6:.1f} MB/s"
        if self.expected and speed > 0:
            left = max(self.expected - self.bytes, 0) / speed
            text += f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"
        return text
