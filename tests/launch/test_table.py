"""The table at the end of a run, as a terminal shows it."""

import io

import pytest

from polarlm.launch.train import spaced, undertrained_note
from polarlm.printing import fitted


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("loss", "warned"), [(5.0, True), (4.0, False)])
def test_a_model_that_loses_to_pairs_of_tokens_is_called_undertrained(loss, warned):
    assert bool(undertrained_note({"val/loss": loss, "baselines": {"bigram": {"loss": 4.5}}})) is warned
    assert undertrained_note({"val/loss": loss}) == []  # nothing to compare with


def test_a_unit_stands_apart_from_its_number():
    assert (spaced("1.5M"), spaced("312")) == ("1.5 M", "312 ")


def test_long_lines_are_broken_between_words_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = "  tokens      61,440 in 0:26 of training (2.4k tokens/s), 0:27 more for validation and diagnostics\n  next"
    lines = fitted(text, Terminal(), hang=14).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 3 and lines[1][:14].isspace() and not lines[1][14].isspace()
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert fitted(text, io.StringIO()) == text


def test_numbers_at_several_lengths_stand_beside_their_length():
    from polarlm.launch.evaluate import table_of

    results = {
        "factor": [1, 2],
        "context": [32, 64],
        "metrics": [{"loss": 1.5}, {"loss": 2.5}],
        "by_position": [[1], [2]],
    }
    head, *rows = (line.split() for line in table_of(results, "by_length"))
    assert head == ["factor", "context", "loss"]
    assert rows == [["1", "32", "1.5000"], ["2", "64", "2.5000"]]


def test_a_difference_that_rounds_to_zero_has_no_sign():
    from polarlm.report.tables import show_estimate
    from polarlm.verdict.evidence import estimate_mean

    assert show_estimate(estimate_mean([-0.005, 0.0042]), signed=True).startswith("0.000 ±")


def test_every_corruption_and_rate_is_a_row_that_fits_80_columns():
    from polarlm.launch.evaluate import table_of

    columns = {"loss": [1.5, 2.5], "loss_after_clean_token": [1.5, 2.25]}
    answer = {"rate": [0.0, 0.1], **dict.fromkeys(("random", "shuffled", "repeated"), columns)}
    lines = table_of(answer, "by_corruption")
    assert lines[:3] == [
        "kind      rate  loss  loss after clean token",
        "random       0   1.5                     1.5",
        "random     0.1   2.5                    2.25",
    ]
    assert len(lines) == 7 and lines[-1].startswith("repeated")
