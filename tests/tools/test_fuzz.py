"""The fuzz target itself: it finds what is neither an answer nor a UserError, and a short run finds nothing."""

from tools import fuzz


def test_damaged_folders_and_wrong_commands_are_answers_or_one_sentence():
    reports = []
    assert fuzz.fuzz(0.1, seed=3, report=reports.append) == 0, reports
    assert int(reports[-1].split()[0]) >= 2  # inputs tried


def test_another_exception_is_a_finding(monkeypatch):
    def broken(folder, thorough):
        raise KeyError("forgotten")

    monkeypatch.setattr(fuzz, "read_folder", broken)
    reports = []
    assert fuzz.fuzz(0.05, seed=3, report=reports.append) == 1 and "KeyError" in reports[0]
