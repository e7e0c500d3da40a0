"""Text from a model or a stranger, safe to print: a terminal obeys control characters, so they are shown instead."""

from __future__ import annotations

import unicodedata

# Cc: control characters; Cf: invisible formatting (also what turns text around); the rest has no glyph of its own.
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_KEPT = "\n\t\u200d"  # line ends, tabs, and the joiner inside emoji


def visible_text(text: str) -> str:
    """The text with every control or invisible character written as an escape: \\x1b, \\u202e."""
    return "".join(
        character if character in _KEPT or unicodedata.category(character) not in _HIDDEN else escape(character)
        for character in text
    )


def escape(character: str) -> str:
    """A character as Python would write it in a string."""
    return character.encode("unicode_escape").decode("ascii")
