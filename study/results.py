"""docs/study/*.json → docs/results.md and its pictures; the same rows always give the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.runs.files import write_text
from polarlm.runs.identity import key_of
from polarlm.verdict.budget import Gain
from polarlm.verdict.sentences import probability
from study.compute import SIZES, Laws, fit_laws, settings_of_parts
from study.judge import JudgedPart, Line, check_known, judge_part
from study.numbers import fill
from study.plan import Part, Question, every_question
from study.rows import PRIVATE
from study.summaries import read_summary

COMMAND = "python -m polarlm study results"
INTRODUCTION = f"""# Results

After reading this page you know where `polar` is ahead, by how much, against which baseline and at which scale, and
which of its parts pay. `{COMMAND}` writes the page from the rows in `docs/study`, one row per training run.

**How to read the tables.** A difference is variant minus baseline on paired seeds, with its 95 % interval (paired t).
For bits per byte, below zero is better. The verdict corrects p for all comparisons of one setting (Holm); "no
difference shown" means that the evidence does not decide. "Same loss" says how many times the variant's FLOPs and
processor seconds the baseline needs to reach the variant's loss. The question, metric, margin and seeds were written
into `configs/study` before the runs; exceptions are marked. Learning rates are tuned on a held-out seed.
[Statistics](statistics.md) explains the terms.
"""
MERGED_FROM = 7  # compared variants of a setting from which those that show nothing share a row
MERGED_FROM_OF_SEARCHES = 4  # the same in questions outside `all`


@dataclass(frozen=True)
class Answer:
    """A question with its judged parts (None: not run) and its paragraphs."""

    question: Question
    parts: Mapping[str, JudgedPart | None]
    words: str


def read_answers(summaries: Path) -> list[Answer]:
    """Every question that belongs on the page, judged."""
    answers = []
    for question in every_question():
        if not question.number:  # the first look for newcomers
            continue
        summary = read_summary(summaries, question.name)
        check_known(question, summary)
        parts = {name: judge_part(question, name, summary) for name in question.parts}
        answers.append(Answer(question, parts, commentary(summaries, question.name)))
    return answers


def write(summaries: Path, out: Path) -> list[Path]:
    """Write the page and its pictures; returns all files, the page first."""
    from study.pictures import PICTURES, recorded_date, write_picture

    answers = read_answers(summaries)
    write_text(out, page(answers, summaries))
    date = recorded_date(summaries)
    return [out, *(write_picture(name, answers, summaries, date) for name in PICTURES)]


def page(answers: Sequence[Answer], summaries: Path) -> str:
    """The whole text."""
    numbers = {answer.question.name: answer.parts for answer in answers}
    sections = [section(answer, numbers) for answer in answers]
    short, others = (fill(commentary(summaries, name), numbers) for name in ("overview", "others"))
    picture = "![All comparisons with polar: differences with intervals, by baseline](study/overview.svg)"
    return "\n".join([INTRODUCTION, short, "", picture, "", *sections, details(answers), "", others, ""])


def commentary(summaries: Path, name: str) -> str:
    """docs/study/<name>.md: what is written by hand. Numbers in braces are filled in from the rows."""
    path = summaries / f"{name}.md"
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return re.sub(r"(?<!\n)\n *(?![\n#!|-])", " ", text)  # a paragraph is one line: filled-in numbers need no wrapping


def section(answer: Answer, numbers: Mapping[str, Mapping[str, JudgedPart | None]]) -> str:
    """One question: what was asked and decided before, the answer in words, one table."""
    question = answer.question
    lines = [f"## {question.number}. {question.title}", "", question.question.strip(), ""]
    if all(judged is None for judged in answer.parts.values()):
        return "\n".join([*lines, f"**Not run yet.** The plan is ready: `configs/study/{question.name}.yaml`.", ""])
    margin = f", differences below {question.margin:g} do not matter" if question.margin else ""
    lines += [
        f"*Decided before the runs (`configs/study/{question.name}.yaml`; [rows](study/{question.name}.json)): "
        f"`{question.metric}`{margin}; {question.rule.strip()}*",
        "",
        fill(answer.words, numbers, question.name),
        "",
        levels_table(answer) if question.show == "levels" else table(answer),
    ]
    if question.fit:
        lines += ["", *fit_lines(answer)]
    missing = [question.parts[name].title for name, judged in answer.parts.items() if judged is None]
    if missing and question.in_all:  # of the other questions the table "What was not run" says it
        lines += ["", f"Not run yet: {'; '.join(missing)}."]
    return "\n".join([*lines, ""])


def table(answer: Answer) -> str:
    """One row per comparison, in the plan's order; the setting stands in the first row of its part."""
    rows = [["setting", "baseline", "variant", "result", "difference (95 % interval)", "p", "verdict", "same loss"]]
    rows.append(["---"] * len(rows[0]))
    for name, judged in answer.parts.items():
        part = answer.question.parts[name]
        again = (part.evaluate or part.probes) and "question 1" in part.title  # runs whose losses question 1 compares
        if judged is not None and not again:
            rows += part_rows(answer.question, part, judged)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def levels_table(answer: Answer) -> str:
    """Settings by variants: means; bold where one is shown better than the baseline, italic where it is shown worse."""
    judged = {name: part for name, part in answer.parts.items() if part is not None}
    variants = list(dict.fromkeys(line.variant for part in judged.values() for line in part.lines))
    rows = [["setting", *(f"`{variant}`" for variant in variants)], ["---"] * (len(variants) + 1)]
    marks = {"better": "**", "worse": "*"}
    for name, part in judged.items():
        cells = {}
        for line in part.lines:
            mark = marks.get(line.outcome, "")
            seeds = len(line.rows)
            planned = len(answer.question.seeds_of(answer.question.parts[name]))
            cells[line.variant] = f"{mark}{line.mean.mean:.3f}{mark}" + f" ({seeds} of {planned})" * (seeds < planned)
        rows.append([answer.question.parts[name].title, *(cells.get(variant, "") for variant in variants)])
    legend = "Means; **bold**: shown better than the baseline, *italic*: shown worse; in brackets: seeds so far."
    return "\n".join([legend, "", *(f"| {' | '.join(cells)} |" for cells in rows)])


def fit_lines(answer: Answer) -> list[str]:
    """The laws of loss against compute, a row per block; why there are none while sizes are missing."""
    assert answer.question.fit is not None
    baseline = answer.question.baseline
    rungs = settings_of_parts(answer.parts, baseline)
    laws, picture = fit_laws(rungs), "![Loss against training compute, and the gap to the baseline](study/compute.svg)"
    if laws is None:
        sizes = len({rung.size for rung in rungs})
        missing = f"No law is fitted: all blocks were trained at {sizes} of the {SIZES} sizes that it takes at least."
        return [missing, "", picture]
    ends = [rungs[0].flops[baseline], rungs[-1].flops[baseline], answer.question.fit]
    titles = [f"{kind} at {end:.1e} FLOPs" for end in ends for kind in ("gap", "gain")]
    titles[-2:] = [f"extrapolated: {title}" for title in titles[-2:]]
    rows = [["block", "exponent", *titles], ["---"] * (2 + len(titles))]
    for block in laws.exponent:
        cells = [f"`{block}`", _with_interval(laws, laws.exponent[block], ".4f")]
        for end in ends if block != baseline else ():
            cells.append(_with_interval(laws, laws.gap(block, baseline, end), "+.3f"))
            cells.append(_with_interval(laws, laws.gain(block, baseline, end), ".2f"))
        rows.append(cells + [""] * (2 + len(titles) - len(cells)))
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    return [
        f"Power laws through {len(rungs)} settings of {len({rung.size for rung in rungs})} sizes. Gap: loss minus that "
        f"of `{baseline}`; gain: times the compute that `{baseline}` needs for the same loss"
        + ("; 95 % intervals over seeds." if laws.has_interval else "; single seeds, so no intervals."),
        "",
        *table,
        "",
        picture,
    ]


def _with_interval(laws: Laws, draws: np.ndarray, form: str) -> str:
    interval = laws.interval(draws)
    between = f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else ""
    return f"{draws[0]:{form}}{between}".replace("-", "−")


def part_rows(question: Question, part: Part, judged: JudgedPart) -> list[list[str]]:
    """The rows of one setting."""
    seeds = max(len(line.rows) for line in judged.lines)
    unit = "" if judged.measure.name == question.metric else f", {judged.measure.title}"
    setting = f"{part.title}, {seeds} seed{'s' * (seeds != 1)}{unit}"
    levels = {line.variant: f"{line.mean.mean:.3f}" for line in judged.lines}
    compared = [line for line in judged.lines if line.comparison is not None]
    if not compared:
        return [
            [setting, "", f"`{line.variant}`", levels[line.variant], "", "", line.outcome, ""] for line in judged.lines
        ]
    ladder = part.compare == "previous"
    open_ = [line for line in compared if line.outcome not in ("better", "worse")]
    many = MERGED_FROM if question.in_all else MERGED_FROM_OF_SEARCHES
    merged = open_ if len(compared) >= many and len(open_) > 2 and not ladder else []
    rows = []
    for line in compared:
        c = line.comparison
        if c is None or line in merged:
            continue
        cells = [f"`{c.baseline}` {levels[c.baseline]}", f"`{line.variant}`", levels[line.variant], difference(line)]
        p = "" if c.p_adjusted is None else probability(c.p_adjusted).removeprefix("= ")
        rows.append(["", *cells, p, verdict_words(line), savings(line.gains)])
    if merged:
        means = [line.comparison.difference.mean for line in merged if line.comparison]
        base = next(line.comparison.baseline for line in merged if line.comparison)
        names = f"{len(merged)} {'others' if rows else 'variants'}: " + ", ".join(
            f"`{line.variant}`" for line in merged
        )
        spread = f"{signed(min(means))} to {signed(max(means))} (means)"
        rows.append(["", f"`{base}` {levels[base]}", names, "", spread, "", "no difference shown", ""])
    rows[0][0] = setting
    return rows


def verdict_words(line: Line) -> str:
    """The verdict; a difference that is shown stands in bold."""
    return f"**{line.outcome}**" if line.outcome in ("better", "worse") else line.outcome


def difference(line: Line) -> str:
    """`−0.1095 (−0.1204 to −0.0986)`: the mean and its own 95 % interval, as the figure draws them."""
    c = line.comparison
    if c is None:
        return ""
    d = c.difference
    return signed(d.mean) + (
        f" ({signed(d.low)} to {signed(d.high)})" if d.low is not None and d.high is not None else ""
    )


def signed(number: float) -> str:
    """+0.0123 with a real minus sign and four decimals: columns of them can be compared at a glance."""
    return f"{number:+.4f}".replace("-", "−")


def savings(gains: Sequence[Gain]) -> str:
    """`1.34× FLOPs, 1.32× s`: what the baseline needs for the variant's loss; in brackets where it is not shown."""
    short = {"FLOPs": "FLOPs", "processor seconds": "s", "seconds": "s"}
    known = {gain.currency: gain for gain in gains if gain.currency in short}
    words = []
    for currency in ("FLOPs", "processor seconds", "seconds"):
        if currency in known:
            gain = known[currency]
            said = f"{gain.factor.mean:.2f}× {short[currency]}"
            words.append(said if gain.outcome in ("better", "worse") else f"({said})")
    return ", ".join(words)


def details(answers: Sequence[Answer]) -> str:
    """One collapsed table: the searches, the seeds and the commands of every setting, each run where it comes first."""
    lines = [
        "## Seeds, searches and commands",
        "",
        "<details><summary>One row per setting; runs that several questions share are listed once</summary>",
        "",
        "| setting | result of every seed; tuned value and validation loss (nats) of every value tried | command |",
        "| --- | --- | --- |",
    ]
    listed: set[str] = set()
    for answer in answers:
        for name, judged in answer.parts.items():
            new = [line for line in judged.lines if not line.identities <= listed] if judged else []
            listed.update(*(line.identities for line in new))
            if new:
                said = "<br>".join(map(line_details, new))
                lines.append(f"| {answer.question.name}/{name} | {said} | `{shared_command(new)}` |")
    return "\n".join([*lines, "", "</details>"])


def line_details(line: Line) -> str:
    """A variant's seeds, its search and what its command adds."""
    losses = ", ".join(f"{seed}: {loss:.5g}" for seed, loss in sorted(line.losses.items()))
    tried = ", ".join(f"{value:g} → {_number(loss)}" for value, loss in line.tried.items())
    search = f"; searched {tried}; chose {line.value:g}" if tried and line.value is not None else ""
    edge = " (at an end of the search)" if is_at_an_end(line) else ""
    return f"`{line.variant}` {losses}{search}{edge}"


def is_at_an_end(line: Line) -> bool:
    """Whether the search chose the smallest or the largest of several values."""
    return len(line.tried) > 1 and line.value in (min(line.tried), max(line.tried))


def shared_command(lines: Sequence[Line]) -> str:
    """One command for a whole setting: what all variants share, with the seeds; `…` stands for the variant's own."""
    words = [command(line.rows).split() for line in lines]
    shared = [word for word in words[0] if all(word in other for other in words)]
    own = any(set(other) - set(shared) for other in words)
    return " ".join(shared) + (" …" if own else "")


def command(rows: Sequence[dict[str, Any]]) -> str:
    """One command for all seeds of a variant."""
    words = [text for text in rows[0]["command"].split() if key_of(text) not in (*PRIVATE, "seed")]
    seeds = ",".join(str(row["seed"]) for row in rows)
    return " ".join([*words, *(["-m"] if len(rows) > 1 else []), f"seed={seeds}"])


def _number(loss: float | None) -> str:
    return "failed" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"
