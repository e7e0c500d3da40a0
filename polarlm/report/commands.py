"""`python -m polarlm compare runs/*`: run folders → a page, a table in the terminal, CSV or JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from polarlm.runs.reading import Run

FORMATS = ("png", "svg", "pdf")
PURPOSE = "compare runs: a page with verdicts, curves and geometry, or a table"
DESCRIPTION = """Compare run folders. Runs that differ only in their seed form a group.
Groups are compared with a baseline on paired seeds."""
EPILOG = """examples
  python -m polarlm compare runs/* --out report.html      one self-contained page
  python -m polarlm compare runs --text                   the same table here
  python -m polarlm compare runs --watch                  keep the page up to date while runs are training
  python -m polarlm compare runs --group first-look       only the runs that were trained with group=first-look
  python -m polarlm compare runs --sweep blocks           only the runs of one sweep
  python -m polarlm compare runs --figure forest --picture verdict.svg
  python -m polarlm compare runs --figure all --format pdf --latex table.tex      for a paper
  python -m polarlm compare runs --text --metric test/perplexity --published 28.01
  python -m polarlm compare runs --csv runs.csv --json runs.json --baseline rfa
"""


def add_parser(verbs: Any) -> None:
    """Add the verb `compare` to the command line."""
    parser = verbs.add_parser("compare", help=PURPOSE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", help="run folders, patterns, or folders that contain runs")
    parser.add_argument("--group", metavar="NAME", help="only runs trained with group=NAME (patterns work: 'lr-*')")
    parser.add_argument("--sweep", metavar="NAME", help="only runs of this sweep, reused ones included")
    parser.add_argument(
        "--searches", action="store_true", help="include the runs of learning-rate searches (tune, trial)"
    )
    parser.add_argument(
        "--out", type=Path, help="the page (default: report.html, unless --text, --csv, --json or --latex is given)"
    )
    parser.add_argument("--text", action="store_true", help="print the final table and the verdicts")
    parser.add_argument("--latex", metavar="FILE", help="the final table for a paper (booktabs; '-' prints it)")
    parser.add_argument("--csv", metavar="FILE", help="one row per run ('-' prints it)")
    parser.add_argument("--json", metavar="FILE", help="judged numbers and all curves ('-' prints it)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="a picture of the page: .png, .svg or .pdf (needs Chromium)"
    )
    parser.add_argument(
        "--figure",
        metavar="NAME",
        help="draw one figure instead of the page (forest, response, waterfall, bits, length, …), or 'all': every "
        "figure at print size into figures/, with captions.txt",
    )
    parser.add_argument(
        "--wandb", nargs="?", const="polarlm", metavar="PROJECT", help="push verdict, table and forest plot to wandb"
    )
    parser.add_argument("--format", choices=FORMATS, default="pdf", help="file format for --figure all (pdf)")
    parser.add_argument("--baseline", help="block or group to compare with (standard if present, else the first)")
    parser.add_argument(
        "--metric", help="the metric to judge, e.g. val/loss (default: test/bits_per_byte if all runs have it)"
    )
    parser.add_argument(
        "--margin",
        type=float,
        help="smallest difference that matters, in the unit of the metric (0.005 bits per byte)",
    )
    parser.add_argument(
        "--published",
        type=float,
        metavar="NUMBER",
        help="test the mean over seeds against a published number (one-sample t; needs --metric)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="planned seeds per group: no verdict earlier, so early looks cost nothing",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="rewrite the page every SECONDS (10) until Ctrl-C; the open page reloads itself",
    )
    parser.set_defaults(run=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Carry out the verb; returns the exit code."""
    from polarlm.runs.reading import MAX_NUMBER

    if arguments.watch is not None and arguments.watch <= 0:
        raise UserError(f"--watch {arguments.watch:g}: give a positive number of seconds")
    if arguments.published is not None and not arguments.metric:
        given = f"--published {arguments.published:g}"
        raise UserError(f"{given}: name its metric, for example --metric test/perplexity {given}")
    for name, least in (("margin", 0.0), ("seeds", 1), ("published", 0.0)):
        value = getattr(arguments, name)
        if value is not None and not least < value < MAX_NUMBER:
            shown = f"{value:g}" if isinstance(value, float) else str(value)[:40]
            raise UserError(f"--{name} {shown}: give a number above {least:g}")
    if arguments.figure and arguments.figure != "all" and not arguments.picture:
        raise UserError(f"--figure {arguments.figure}: add --picture FILE.png, .svg or .pdf")
    if arguments.picture and arguments.figure != "all" and arguments.picture.suffix[1:] not in FORMATS:
        raise UserError(f"--picture {arguments.picture}: the file name must end in .{', .'.join(FORMATS)}")
    if arguments.picture and not arguments.figure and arguments.picture.suffix == ".svg":
        raise UserError(
            f"--picture {arguments.picture}: a whole page has no SVG; add --figure forest, or take .png or .pdf"
        )
    only_data = arguments.text or arguments.csv or arguments.json or arguments.latex or arguments.wandb
    if arguments.out is None and (arguments.watch or arguments.picture or arguments.figure or not only_data):
        arguments.out = Path("report.html")
    cache: dict = {}
    if arguments.watch is None:
        _write_all(arguments, cache)
        return 0
    print(f"Watching; open {arguments.out} in a browser. Ctrl-C ends it.", file=sys.stderr)
    try:
        while True:
            _write_all(arguments, cache, reload_seconds=arguments.watch)
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        _write_all(arguments, cache)  # the last page does not load itself again
        return 0


def _write_all(arguments: argparse.Namespace, cache: dict, reload_seconds: float | None = None) -> None:
    from polarlm.report.captions import shared_caption
    from polarlm.report.page import write_page
    from polarlm.report.payload import build_payload
    from polarlm.report.pictures import write_figures, write_picture
    from polarlm.report.tables import csv_report, json_report, latex_report, protocol_caption, text_report
    from polarlm.runs.reading import find_run_folders, read_runs
    from polarlm.verdict.groups import group_runs
    from polarlm.verdict.headline import compare_published, published_sentence
    from polarlm.verdict.judgement import Looks, judge_groups

    groups = group_runs(selected(read_runs(find_run_folders(arguments.runs), cache), arguments))
    runs = [run for group in groups for run in group.runs]
    looks = Looks.beside(runs)
    judgement = judge_groups(
        groups,
        arguments.metric,
        arguments.baseline,
        margin=arguments.margin,
        planned_seeds=arguments.seeds,
        looks=looks,
    )
    if arguments.published is not None:
        compared = compare_published(groups, judgement, arguments.published, arguments.seeds, looks)
        judgement.notes[:0] = [published_sentence(one, judgement) for one in compared]
    trouble = looks.record(judgement.looked)
    if trouble:
        print(f"warning: {trouble}", file=sys.stderr)
    out = Path(arguments.out).absolute() if arguments.out else None
    if arguments.text:
        print(text_report(judgement, min(80, shutil.get_terminal_size((80, 24)).columns)))
    if arguments.latex:
        _emit(arguments.latex, latex_report(judgement))
    if arguments.csv:
        _emit(arguments.csv, csv_report(groups))
    if arguments.wandb and reload_seconds is None:
        _push(arguments, judgement, runs)
    if out or arguments.json:
        payload = build_payload(groups, judgement, out, reload_seconds)
        if arguments.json:
            _emit(arguments.json, json.dumps(json_report(judgement, payload), allow_nan=False) + "\n")
        if out:
            write_page(groups, judgement, payload, out)
            count = sum(len(group.runs) for group in groups)
            size = f"{count} runs, {out.stat().st_size / 1e6:.1f} MB"
            print(f"Wrote {arguments.out} ({size}). Open it in a browser.", file=sys.stderr)
            if reload_seconds is not None:
                return
            if arguments.figure == "all":
                folder = arguments.picture or Path("figures")
                captions = protocol_caption(judgement), shared_caption(groups)
                for file in write_figures(out, folder, arguments.format, *captions):
                    print(file, file=sys.stderr)
            elif arguments.picture:
                write_picture(out, arguments.picture, arguments.figure)
                print(arguments.picture, file=sys.stderr)


def _push(arguments: argparse.Namespace, judgement: Any, runs: list[Run]) -> None:
    """Verdict, table and forest plot as one wandb run, named after the sweep or group."""
    from polarlm.report.tables import results_table, text_report
    from polarlm.report.verdict_data import forest_rows
    from polarlm.training.loggers.wandb import log_comparison

    forest = [{**row, "label": judgement.rows[row["group"]].group.label} for row in forest_rows(judgement) or []]
    seen = log_comparison(
        name=arguments.sweep or arguments.group or "comparison",
        project=arguments.wandb,
        folder=Path(runs[0].folder).parent / ".comparisons",
        text=text_report(judgement),
        table=results_table(judgement),
        forest=forest,
    )
    print(f"wandb: {seen}", file=sys.stderr)


def selected(runs: list[Run], arguments: argparse.Namespace) -> list[Run]:
    """The runs that --group, --sweep and --searches choose; searches are left out unless nothing else is there."""
    kept = runs
    if arguments.group:
        names = sorted({str(run.config.get("group")) for run in runs if run.config.get("group")})
        kept = [run for run in runs if fnmatchcase(str(run.config.get("group")), arguments.group)]
        if not kept:
            near = did_you_mean(arguments.group, names)
            raise UserError(
                f"--group {arguments.group}: no run was trained with it. {near}Groups: {', '.join(names) or 'none'}"
            )
    if arguments.sweep:
        kept = _of_sweep(kept, arguments.sweep)
    if arguments.searches:
        return kept
    final = [run for run in kept if not is_search(run)]
    if not final or len(final) == len(kept):
        return kept
    print(
        f"Left out {len(kept) - len(final)} runs of hyperparameter searches (--searches includes them)", file=sys.stderr
    )
    return final


def is_search(run: Run) -> bool:
    """Whether a run only chose a hyperparameter: of `polarlm tune`, or of the search of a trial or a study."""
    from polarlm.verdict.trials import TUNING_SEED

    group = str(run.config.get("group") or "")
    journal = run.folder.parent / ".sweeps" / group / "study.journal"
    return run.seed == TUNING_SEED or group.startswith("tune-") or (bool(group) and journal.exists())


def _of_sweep(runs: list[Run], name: str) -> list[Run]:
    """The runs of a sweep by the plan that it keeps in .sweeps/<name>/plan.json beside its runs."""
    from polarlm.runs.identity import identity_of, read_plan

    places = sorted({run.folder.parent for run in runs})
    plans = [plan for place in places if (plan := read_plan(place, name))]
    if not plans:
        names = sorted({file.parent.name for place in places for file in place.glob(".sweeps/*/plan.json")})
        raise UserError(f"No sweep '{name}' here. {did_you_mean(name, names)}Sweeps: {', '.join(names) or 'none'}")
    wanted = {job["identity"] for plan in plans for job in plan["jobs"]} - {""}
    kept = [run for run in runs if run.config and identity_of(run.config) in wanted]
    if not kept:
        raise UserError(f"--sweep {name}: none of its runs has started yet")
    return kept


def _emit(target: str, text: str) -> None:
    from polarlm.runs.files import write_text

    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(target).absolute(), text)
