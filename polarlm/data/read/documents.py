"""Documents as a stream of bounded pieces, so that a 50 GB document needs no more memory than a tweet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polarlm.errors import UserError

PIECE_CHARS = 1 << 20
# Characters of a line or document that is held in memory whole; a file that is one document has no such limit.
LARGEST_DOCUMENT = 1 << 30
# A byte-level BPE never merges across (letter, space), whatever its pre-tokeniser's expression: encoding the two sides
# apart gives the ids of the whole.
_SAFE = re.compile(r"[A-Za-z](?= )")
# Good enough for GPT-2's expression, where a token never continues from a visible character into white space.
_NEARLY_SAFE = re.compile(r"\S(?=\s)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text of one document; `first` and `last` say whether it begins and ends that document."""

    text: str
    first: bool = True
    last: bool = True
    split: str | None = None


def cut_point(text: str, limit: int) -> int:
    """The last index in the second half of `text[:limit]` where cutting does not change any token, else `limit`."""
    for boundary in (_SAFE, _NEARLY_SAFE):
        # Look at growing tails: the boundary is nearly always within the last line.
        for tail in (256, 8192, limit // 2):
            begin = max(limit - tail, limit // 2)
            ends = [match.end() for match in boundary.finditer(text, begin, limit)]
            if ends:
                return ends[-1]
    return limit


def pieces_of(blocks: Iterable[str], limit: int = PIECE_CHARS) -> Iterator[Piece]:
    """Cut one document, given as consecutive blocks of text, into pieces of at most `limit` characters."""
    waiting, first = "", True
    for block in blocks:
        waiting += block
        while len(waiting) > limit:
            cut = cut_point(waiting, limit)
            yield Piece(waiting[:cut], first=first, last=False)
            waiting, first = waiting[cut:], False
    yield Piece(waiting, first=first, last=True)


def require_short(length: int, where: str, what_to_do: str) -> None:
    """Refuse a line or document that is too long to be held in memory whole."""
    if length >= LARGEST_DOCUMENT:
        raise UserError(
            f"{where} has {length:,} characters or more; allowed are fewer than {LARGEST_DOCUMENT:,}, because it is "
            f"held in memory. {what_to_do}"
        )


def documents_by_separator(blocks: Iterable[str], separator: str, where: str = "a document") -> Iterator[str]:
    """Documents between occurrences of a literal separator, which belongs to none of them."""
    waiting = ""
    for block in blocks:
        *complete, waiting = (waiting + block).split(separator)
        for text in complete:
            yield text.strip("\n")
        require_short(len(waiting), where, "Check data.document_separator, or leave it out.")
    if waiting.strip():
        yield waiting.strip("\n")


def documents_by_heading(rows: Iterable[str], heading: str, where: str = "a document") -> Iterator[str]:
    """Rows joined into documents, a new one beginning at every row that matches the regular expression `heading`."""
    starts = re.compile(heading)
    current: list[str] = []
    length = 0
    for row in rows:
        if current and starts.match(row):
            yield "".join(current)
            current, length = [], 0
        current.append(row)
        length += len(row)
        require_short(length, where, "Check data.document_start, or leave it out.")
    if current:
        yield "".join(current)
