"""The fuzz target itself: it finds what is neither an answer nor a UserError, and a short run finds nothing."""

from tools import fuzz


def test_damaged_folders_and_wrong_commands_are_answers_or_one_sentence():
    reports = []
    assert fuzz.fuzz(5, seed=3, report=reports.append, inputs=12) == 0, reports
    assert reports[-1].startswith("12 inputs")


def test_another_exception_is_a_finding(monkeypatch):
    def broken(folder, thorough):
        raise KeyError("forgotten")

    monkeypatch.setattr(fuzz, "read_folder", broken)
    reports = []
    assert fuzz.fuzz(5, seed=3, report=reports.append, inputs=2) == 1 and "KeyError" in reports[0]
