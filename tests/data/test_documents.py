import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.data.readers import documents_by_heading, documents_by_separator, pieces_of

WORDS = st.text(alphabet="ab Z.\n\t1é北", max_size=400)


@given(WORDS, st.integers(8, 64))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_document_and_are_bounded(text: str, limit: int) -> None:
    pieces = list(pieces_of([text], limit))
    assert "".join(p.text for p in pieces) == text
    assert all(len(p.text) <= limit for p in pieces)
    assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]


@given(WORDS, st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_how_a_document_arrives_does_not_change_its_pieces(text: str, sizes: list[int]) -> None:
    blocks, rest = [], text
    for size in itertools.cycle(sizes):
        if not rest:
            break
        blocks.append(rest[:size])
        rest = rest[size:]
    assert list(pieces_of(blocks, 32)) == list(pieces_of([text], 32))


def test_a_cut_prefers_the_end_of_a_word() -> None:
    assert next(iter(pieces_of(["hello big wide world of words"], 16))).text == "hello big wide"


def test_separator_across_blocks() -> None:
    assert list(documents_by_separator(["one<|end", "|>two<|end|>", "three"], "<|end|>")) == ["one", "two", "three"]


def test_rows_are_joined_until_the_next_heading() -> None:
    rows = [" = A = \n", " x \n", " = = Part = = \n", " = B = \n", " y \n"]
    assert list(documents_by_heading(rows, r"^ = [^=].* = \n?$")) == ["".join(rows[:3]), "".join(rows[3:])]
