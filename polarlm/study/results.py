"""docs/study/*.json → docs/results.md and its pictures; the same summaries always give the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.runs.files import write_text
from polarlm.runs.sweeps import key_of
from polarlm.study.curves import curve_tables, markdown_table, probe_tables
from polarlm.study.judge import JudgedPart, Line, check_known, judge_part
from polarlm.study.plan import Question, every_question
from polarlm.study.rows import PRIVATE
from polarlm.study.summaries import read_summary
from polarlm.verdict.sentences import signed

INTRODUCTION = """# What we have found

This page is generated: `python -m polarlm study results` writes it from `docs/study/*.json`, which hold one row per
run (settings, seed, commit, torch version, losses, parameters, FLOPs, seconds, command); `make study` trains what the
plan in `configs/study` asks for and writes the rows. The question, the number that decides, the margin, the seeds and
the stopping rule stood in the plan before its runs began. Verdicts are those of [statistics.md](statistics.md): paired
seeds, Holm over everything that is compared in a table, "no difference shown" where the evidence does not decide.
Small models on small corpora: these are answers about this scale. Times are those of the runs as they were, whatever
else the machine did; FLOPs and tokens travel, milliseconds do not. "jumps" counts losses far above those of the hundred
steps before them (`trainer.spike_z`) and gradients that were not finite, over all seeds of a row.
"""


def write(summaries: Path, out: Path) -> list[Path]:
    """Write the page and its pictures; returns all files, the page first."""
    from polarlm.study.pictures import forest

    pictures: dict[str, bytes] = {}

    def draw(name: str, judged: JudgedPart) -> str | None:
        picture = forest(judged)
        if picture is None:
            return None
        pictures[f"{name}.svg"] = picture
        return f"{summaries.name}/{name}.svg"

    text = page(summaries, draw)
    write_text(out, text)
    files = [out]
    for name, data in pictures.items():
        path = out.parent / summaries.name / name
        write_text(path, data.decode("utf-8"))
        files.append(path)
    return files


def page(summaries: Path, draw: Callable[[str, JudgedPart], str | None]) -> str:
    """The whole text."""
    answers: list[tuple[Question, dict[str, JudgedPart | None]]] = []
    for question in every_question():
        summary = read_summary(summaries, question.name)
        if not question.in_all and not summary.rows:
            continue
        check_known(question, summary)
        answers.append((question, {name: judge_part(question, name, summary) for name in question.parts}))
    words = {question.name: commentary(summaries, question.name) for question, _ in answers}
    sections = [section(question, parts, words[question.name], draw) for question, parts in answers]
    text = "\n".join([INTRODUCTION, overview(answers, words), *sections])
    others = commentary(summaries, "others").get("")
    return text + (f"\n{others}\n" if others else "")


def commentary(summaries: Path, name: str) -> dict[str, str]:
    """docs/study/<question>.md by part: what stands before the first `# part` belongs to the question."""
    path = summaries / f"{name}.md"
    parts: dict[str, list[str]] = {"": []}
    current = parts[""]
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("# "):
            current = parts.setdefault(line[2:].strip(), [])
        else:
            current.append(line)
    return {part: "\n".join(lines).strip() for part, lines in parts.items() if "".join(lines).strip()}


def overview(
    answers: Sequence[tuple[Question, Mapping[str, JudgedPart | None]]], words: Mapping[str, Mapping[str, str]]
) -> str:
    """Every finding in one line, below its question; of a part that asks for more than losses what stands in bold."""
    lines = ["## In short", ""]
    for question, parts in answers:
        title = f"{question.number}. {question.title}"
        lines.append(f"- **[{title}](#{anchor(title)})**")
        for name, judged in parts.items():
            if judged is not None:
                part = question.parts[name]
                more = part.evaluate or part.probes
                bold = re.findall(r"\*\*(.+?)\*\*", words[question.name].get(name, ""), re.DOTALL) if more else []
                finding = "; ".join(" ".join(text.split()).rstrip(".") for text in bold) or judged.finding
                lines.append(f"  - {part.title}: {finding}.")
        missing = [question.parts[name].title for name, judged in parts.items() if judged is None]
        if missing:
            lines.append(f"  - Not run yet: {'; '.join(missing)}.")
    return "\n".join([*lines, ""])


def anchor(title: str) -> str:
    """How GitHub calls a heading in links."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def section(
    question: Question,
    parts: Mapping[str, JudgedPart | None],
    words: Mapping[str, str],
    draw: Callable[[str, JudgedPart], str | None],
) -> str:
    """One question: what was decided before, then its parts."""
    lines = [
        f"## {question.number}. {question.title}",
        "",
        question.question.strip(),
        "",
        decided(question, any(judged is not None for judged in parts.values())),
        "",
    ]
    if "" in words:
        lines += [words[""], ""]
    for name, part in question.parts.items():
        judged = parts[name]
        lines += [f"### {part.title}", ""]
        if judged is None:
            lines += ["Not run yet.", ""]
            continue
        lines += [f"**{judged.finding}.**", ""]
        if decision := differently_decided(question, name):
            lines += [decision, ""]
        if name in words:
            lines += [words[name], ""]
        lines += [variants_table(question, name, judged), ""]
        if at_the_end := [f"`{line.variant}` ({line.value:g})" for line in judged.lines if is_at_an_end(line)]:
            lines += [
                f"Best at an end of the values that were tried, so perhaps not the best: {', '.join(at_the_end)}.",
                "",
            ]
        picture = draw(f"{question.name}-{name}", judged)
        if picture:
            lines += [f"![{part.title}: differences with intervals]({picture})", ""]
        for extra in (*curve_tables(judged), *probe_tables(judged, part.probes)):
            lines += [extra, ""]
        lines += [details(judged), ""]
    return "\n".join(lines)


def decided(question: Question, rows: bool) -> str:
    """What stood in the plan, with links to it and to the rows, if there are any."""
    margin = f"differences below {question.margin:g} do not matter" if question.margin else "no margin"
    return (
        f"Decided before: `{question.metric}`, {margin}, seeds {_list(question.seeds)}; {question.rule.strip()} "
        f"([plan](../configs/study/{question.name}.yaml){f', [rows](study/{question.name}.json)' * rows})"
    )


def differently_decided(question: Question, name: str) -> str:
    """What a part decides otherwise than its question; empty when nothing."""
    part = question.parts[name]
    words = []
    if question.metric_of(part) != question.metric:
        words.append(f"`{question.metric_of(part)}` decides")
    if question.margin_of(part) != question.margin:
        words.append(f"differences below {question.margin_of(part):g} do not matter")
    if question.seeds_of(part) != question.seeds:
        words.append(f"seeds {_list(question.seeds_of(part))}")
    return f"Here: {', '.join(words)}." if words else ""


def variants_table(question: Question, name: str, judged: JudgedPart) -> str:
    """Variants in the plan's order; no ranking where nothing is shown."""
    part = question.parts[name]
    tune = question.tuning_of(part)
    is_bits = judged.measure.key == "bits_per_byte"
    against = "step" if part.compare == "previous" else f"against `{part.baseline}`"
    head = ["variant", *([f"`{tune.key.rpartition('.')[2]}`"] if tune else []), "seeds", judged.measure.title]
    head += [*(["nats per token"] if is_bits else []), against, "verdict", "parameters", "TFLOPs", "ms/step"]
    counted = all("incidents" in row for line in judged.lines for row in line.rows)  # rows of older runs do not say
    head += ["jumps"] if counted else []
    rows = [head, ["---"] * len(head)]
    for line in judged.lines:
        cells = [f"`{line.variant}`", *([_value(line)] if tune else []), str(line.mean.n), _interval(line)]
        cells += [_mean(line, "val/loss", ".4f")] if is_bits else []
        cells += [_difference(line), line.outcome, _mean(line, "parameters", ",.0f")]
        cells += [_flops(line), _mean(line, "seconds_per_step", ".0f", 1000)]
        cells += [str(sum(row["incidents"] for row in line.rows))] if counted else []
        rows.append(cells)
    return markdown_table(rows)


def is_at_an_end(line: Line) -> bool:
    """Whether the search chose the smallest or the largest of several values."""
    return len(line.tried) > 1 and line.value in (min(line.tried), max(line.tried))


def details(judged: JudgedPart) -> str:
    """Behind a fold: every seed, the search, the sentences, the commands."""
    lines = ["<details><summary>Seeds, verdicts and commands</summary>", ""]
    for line in judged.lines:
        losses = ", ".join(f"{seed}: {loss:.5g}" for seed, loss in sorted(line.losses.items()))
        lines.append(f"- `{line.variant}`: {losses}.")
        if line.tried:
            tried = ", ".join(f"{v:g} → {_number(loss)}" for v, loss in line.tried.items())
            lines.append(f"  Search (nats per token): {tried}.")
        if line.sentence:
            lines.append(f"  {line.sentence}")
        lines.append(f"  `{command(line.rows)}`")
    lines += ["", *judged.notes, "", "</details>"]
    return "\n".join(lines)


def command(rows: Sequence[dict[str, Any]]) -> str:
    """One command for all seeds of a variant."""
    words = [text for text in rows[0]["command"].split() if key_of(text) not in (*PRIVATE, "seed")]
    seeds = ",".join(str(row["seed"]) for row in rows)
    return " ".join([*words, *(["-m"] if len(rows) > 1 else []), f"seed={seeds}"])


def _interval(line: Line) -> str:
    half = line.mean.half_width
    return f"{line.mean.mean:.4f}" + (f" ± {half:.4f}" if half is not None else "")


def _difference(line: Line) -> str:
    c = line.comparison
    if c is None:
        return ""
    low, high = c.simultaneous or (c.difference.low, c.difference.high)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        low, high = c.difference.low, c.difference.high
    between = f" ({signed(low)} to {signed(high)})" if low is not None and high is not None else ""
    return f"{signed(c.difference.mean)}{between}"


def _mean(line: Line, key: str, style: str, factor: float = 1.0) -> str:
    known = [row[key] for row in line.rows if isinstance(row.get(key), (int, float))]
    return format(factor * sum(known) / len(known), style) if known else "–"


def _flops(line: Line) -> str:
    known = [
        row["tokens"] * row["flops_per_token"] for row in line.rows if row.get("tokens") and row.get("flops_per_token")
    ]
    return f"{sum(known) / len(known) / 1e12:.2f}" if known else "–"


def _value(line: Line) -> str:
    if line.value is None:
        return "–"
    return f"{line.value:g}" + ("" if line.tried else " (not searched)")


def _number(loss: float | None) -> str:
    return "failed" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(str(n) for n in numbers)
