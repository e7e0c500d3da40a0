"""Bugs in statistics and verdicts."""

# ruff: noqa: E501
# fmt: off
from tools.mutants.mutant import mutants

V = "polarlm/verdict/"
T = "tests/verdict/"

MUTANTS = [
    *mutants(
        f"{V}evidence.py",
        f"{T}test_comparison.py",
        ("float(2 * stats.t.sf(t, self.freedom))", "float(stats.t.sf(t, self.freedom))", "a one-sided t-test"),
        ("alternative=\"two-sided\"", "alternative=\"less\"", "a one-sided sign-flip test"),
        ("return float(stats.t.isf(alpha / 2, self.freedom))", "return float(stats.t.isf(alpha, self.freedom))", "intervals at twice the level"),
        ("sample.std(ddof=1) / math.sqrt(len(sample))", "sample.std() / math.sqrt(len(sample))", "standard deviation with n instead of n − 1"),
        ("nearest = (margin - abs(self.mean)) / self.error", "nearest = (margin + abs(self.mean)) / self.error", "equivalence is tested at the far end"),
        ("freedom = float(shares.sum() ** 2 / (shares**2 / np.array([len(a) - 1, len(b) - 1])).sum())", "freedom = float(len(a) + len(b) - 2)", "Welch with pooled degrees of freedom"),
        ("return bool(np.ptp(sample) <= 1e-12", "return bool(np.ptp(sample) < 0", "identical runs count as repetitions"),
    ),
    *mutants(
        f"{V}evidence.py",
        f"{T}test_error_rates.py {T}test_comparison.py",
        ("- 0.5 * math.log(gain)", "", "the always-valid rule without its price"),
    ),
    *mutants(
        f"{V}comparison.py",
        f"{T}test_comparison.py {T}test_judgement.py",
        ("winner_lost_seeds = self.diverged[0] if won else self.diverged[1]", "winner_lost_seeds = self.diverged[0] if won else 0", "worse is claimed although the baseline diverged"),
        ("winner_lost_seeds = self.diverged[0] if won else self.diverged[1]", "winner_lost_seeds = 0 if won else self.diverged[1]", "a block that lost seeds may win"),
        ("won = (self.difference.mean < 0) == self.lower_is_better", "won = self.difference.mean < 0", "higher-is-better is ignored"),
        ("shared = tuple(sorted(set(ours) & set(theirs)))", "shared = tuple(sorted(set(ours)))[: len(theirs)]", "seeds are paired with others"),
        ("looks = (planned,) if n > planned else ()", "looks = ()", "seeds beyond the plan cost nothing"),
        ("differences = pairs[:, 0] - pairs[:, 1]", "differences = pairs[:, 1] - pairs[:, 0]", "differences with the sign turned"),
        ("if self.planned and self.difference.n < self.planned:", "if False:", "a verdict before the planned seeds are there"),
        ("EQUIVALENT if self.is_equivalent and not any(self.diverged) else", "EQUIVALENT if self.is_equivalent else", "equivalent although seeds diverged"),
    ),
    *mutants(
        f"{V}family.py",
        f"{T}test_comparison.py",
        ("(len(known) - rank) * p", "p", "no correction for several comparisons"),
        ("running = max(running, min(1.0,", "running = max(0.0, min(1.0,", "adjusted p-values out of order"),
        ("level = alpha / (undecided or len(tested))", "level = alpha", "simultaneous intervals at the level of one"),
    ),
    *mutants(
        f"{V}documents.py",
        f"{T}test_documents.py",
        ("total = float(differences.sum() / sizes.sum())", "total = float((differences / sizes).mean())", "documents weighed equally whatever their length"),
        ("variance = max(float(squares[0] + squares[1] - squares[2]), float(squares.max()))", "variance = float(squares[1])", "the seeds' spread is left out"),
    ),
    *mutants(
        f"{V}currencies.py",
        f"{T}test_currencies.py",
        ("factors.append(needed / spent)", "factors.append(spent / needed)", "gains turned over"),
        ("best = np.minimum.accumulate(losses)", "best = losses", "a curve that rose again has never been lower"),
        ("return BETTER if low > 1 else WORSE if high < 1 else NOT_SHOWN", "return BETTER if high > 1 else WORSE if high < 1 else NOT_SHOWN", "better by the upper end of the interval"),
    ),
    *mutants(
        f"{V}power.py",
        f"{T}test_power.py",
        ("critical, shift = float(stats.t.isf(alpha / 2, freedom)), abs(effect) / error", "critical, shift = float(stats.t.isf(alpha, freedom)), abs(effect) / error", "power of a one-sided test"),
        ("e.error * math.sqrt(now / n)", "e.error * now / n", "the error falls with n instead of √n"),
    ),
    *mutants(
        f"{V}looks.py",
        f"{T}test_judgement.py",
        ("if 2 <= n < seeds)", "if 2 <= n < seeds - 1)", "the last look is forgotten"),
    ),
]
