"""`polarlm study`: carry out the plan, collect runs that were made by hand, write docs/results.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from polarlm.errors import UserError, did_you_mean
from polarlm.jobs.engine import Policy
from polarlm.jobs.places import Here, add_place_options, chosen_place

A100_FLOPS = 312e12 / 4  # dense bf16 peak at the utilisation that docs/gpu.md assumes for 19 M parameters
EPILOG = """examples
  python -m polarlm study all                          the whole plan; the same command resumes it
  python -m polarlm study baselines --budget 90m       one question, at most 90 minutes today
  python -m polarlm study --quick                      three blocks, two seeds, about ten minutes
  python -m polarlm study all --plan                   what would be done
  python -m polarlm study collect baselines runs/*     rows of runs made by train.py, known by their settings
  python -m polarlm study results                      docs/results.md from docs/study/*.json
"""


def add_parser(verbs: Any) -> None:
    """Add the verb `study` to the command line."""
    parser = verbs.add_parser(
        "study",
        help="run the experiments of configs/study and write docs/results.md",
        description="Train what the plan in configs/study asks for, reduce every run to a row in docs/study, and "
        "write docs/results.md from the rows.",
        epilog=EPILOG,
    )
    parser.add_argument("what", nargs="?", default="all", help="a question, all, collect or results (all)")
    parser.add_argument("more", nargs="*", metavar="QUESTION RUNS", help="after collect: a question (or all), folders")
    parser.add_argument("--quick", action="store_true", help="the short question for newcomers")
    parser.add_argument("--only", help="only this question of all")
    parser.add_argument("--part", help="only this part of the question")
    add_place_options(parser)
    parser.add_argument("--stop-on-failure", action="store_true", help="the first job that fails stops the study")
    parser.add_argument("--budget", help="stop after 90s, 15m, 2h; what is running is saved and continued next time")
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parser.add_argument("--reuse-summaries", action="store_true", help="runs whose rows are committed count as done")
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="where the runs go (runs/study)")
    parser.add_argument("--summaries", type=Path, help="where the rows go (docs/study; of --quick the runs' folder)")
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"), help="of results (docs/results.md)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run: trainer=gpu (another study)"
    )
    parser.set_defaults(run=study)


def study(options: argparse.Namespace) -> int:
    """Carry out the verb; returns the exit code."""
    if options.what == "results":
        return write_results(options)
    if options.what == "collect":
        return collect_runs(options)
    if options.more:
        raise UserError(f"'{options.more[0]}' is not understood after {options.what}; see polarlm study --help")
    return run_study(options)


def run_study(options: argparse.Namespace) -> int:
    """Train what is missing; exit code 1 while something is."""
    from polarlm.verdict.trials import seconds_of
    from study.plan import FOLDER, QUICK
    from study.run import Study, write_pages

    name = QUICK if options.quick else options.only or options.what
    questions = selected(name, options.part)
    summaries = options.summaries or (options.runs / ".study" if options.quick else Path("docs") / FOLDER)
    seconds = seconds_of(options.budget) if options.budget else None
    study = Study(questions, options.runs, summaries, options.set, options.reuse_summaries)
    place = chosen_place(options, options.runs / ".study", [question.settings for question in questions])
    print_study_plan(study, place)
    if options.plan:
        print_sizes(study)
        return 0
    complete = study.run(place, seconds, Policy(options.stop_on_failure, options.retries))
    pages = write_pages(study)
    print_state(study, complete, summaries)
    for page in pages:
        print(f"  page: {page}")
    if options.quick and pages:
        open_page(pages[-1])
    return 0 if complete else 1


def selected(name: str, part: str | None) -> list[Any]:
    """The questions asked for, reduced to one part when one is named."""
    from dataclasses import replace

    from study.plan import read_questions

    questions = read_questions(name)
    if part is None:
        return questions
    known = [key for question in questions for key in question.parts]
    if part not in known:
        raise UserError(f"--part {part} does not exist. {did_you_mean(part, known)}Parts: {', '.join(known)}")
    return [replace(q, parts={part: q.parts[part]}) for q in questions if part in q.parts]


def print_study_plan(study: Any, place: Any) -> None:
    """Jobs by question: done and to do; seeds at tuned values are counted once their values are known."""
    from study.run import estimate

    for question in study.questions:
        jobs = {job.identity: job for job in study.planner.ready(question, study.outcome)}
        done = sum(study.outcome(identity) is not None for identity in jobs)
        later = sum(
            len(question.seeds_of(part))
            for name, part in question.parts.items()
            for variant in part.variants
            if not any(j.part == name and j.variant == variant and j.stage == "seeds" for j in jobs.values())
        )
        more = f", {later} more once the search has chosen" if later else ""
        print(
            f"{question.number}. {question.name}: {question.title}\n   {len(jobs)} runs, {done} done{more}", flush=True
        )
    if isinstance(place, Here) and (words := estimate(study, place.at_once, place.threads)):
        print(f"   {words}", flush=True)


def print_sizes(study: Any) -> None:
    """Parameters of every variant, and the work of a run in FLOPs: hours on any machine of known speed."""
    from study.run import sizes

    for where, lines in sizes(study).items():
        print(f"   {where}", flush=True)
        for variant, parameters, flops in lines:
            gpu = f", {flops / A100_FLOPS / 3600:.1f} h" if flops / A100_FLOPS > 360 else ""
            print(f"     {variant:<26} {parameters:>12,} parameters  {flops:.2g} FLOPs{gpu}", flush=True)
    print(f"   (hours at {A100_FLOPS / 1e12:.0f} TFLOP/s: an A100's bf16 peak at a quarter use; not measured)")


def print_state(study: Any, complete: bool, summaries: Path) -> None:
    """What there is now, and what to type next."""
    waiting = study.waiting()
    failed = f", {len(study.failed)} failed (logs: {study.runs_dir}/.study/logs)" if study.failed else ""
    state = "The plan is carried out" if complete else f"{len(waiting)} jobs are left{failed}; run it again to continue"
    # results.md is written from docs/study; the rows of a first look stay with its runs.
    for_results = summaries == Path("docs") / "study"
    use = "; python -m polarlm study results writes docs/results.md from them" if for_results else ""
    print(f"{state}. Rows: {summaries}/*.json{use}.")


def open_page(page: Path) -> None:
    """Show a page in a browser where there is one to show it to."""
    import os
    import webbrowser

    graphical = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.stdout.isatty() and graphical:
        webbrowser.open(page.as_uri())


def collect_runs(options: argparse.Namespace) -> int:
    """Rows of run folders that were made elsewhere or by hand."""
    from polarlm.runs.reading import find_run_folders
    from study.collect import collect
    from study.jobs import Planner
    from study.plan import FOLDER
    from study.summaries import read_summary, write_summary

    if len(options.more) < 2:
        raise UserError("study collect needs a question (or all) and run folders: study collect baselines runs/*")
    name, *places = options.more
    folders = find_run_folders(places)
    place = options.summaries or Path("docs") / FOLDER
    planner, missed = Planner(options.set), None
    for question in selected(name, options.part):
        summary = read_summary(place, question.name)
        collected = collect(question, folders, summary, planner)
        missed = set(collected.unplanned) if missed is None else missed & set(collected.unplanned)
        if collected.new or collected.renewed:
            write_summary(place, summary, question)
        print(f"{question.name}: {collected.new} new rows, {collected.renewed} renewed, {len(summary.rows)} in all")
        if collected.younger:
            listed = ", ".join(sorted(collected.younger)[:8])
            print(f"  of runs that lack settings of today or have others; equal in all else: {listed}")
    if missed:
        print(f"{len(missed)} runs are in no plan, for example {sorted(missed)[0]}")
    return 0


def write_results(options: argparse.Namespace) -> int:
    """docs/results.md and its pictures."""
    from study.plan import FOLDER
    from study.results import write

    files = write(options.summaries or Path("docs") / FOLDER, options.out)
    print(f"{options.out}: {len(files) - 1} pictures beside {files[1].parent if files[1:] else options.out.parent}")
    return 0
