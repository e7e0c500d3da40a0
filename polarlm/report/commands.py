"""`python -m polarlm compare runs/*`: run folders → a page, a table in the terminal, CSV or JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

PURPOSE = "compare run folders: a page with curves, geometry and verdicts, or a table"
DESCRIPTION = """Compare run folders. Runs that differ only in their seed form a group; groups are compared with a
baseline on paired seeds."""
EPILOG = """examples
  python -m polarlm compare runs/* --out report.html      one self-contained page
  python -m polarlm compare runs --text                   the same table here
  python -m polarlm compare runs --watch                  keep the page up to date while runs are training
  python -m polarlm compare runs --picture verdict.png --figure forest
  python -m polarlm compare runs --csv runs.csv --json runs.json --baseline rfa
"""


def add_parser(verbs: Any) -> None:
    """Add the verb `compare` to the command line."""
    parser = verbs.add_parser("compare", help=PURPOSE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", help="run folders, patterns, or folders that contain runs")
    parser.add_argument(
        "--out", type=Path, help="the page (report.html unless only --text, --csv or --json is asked for)"
    )
    parser.add_argument("--text", action="store_true", help="print the final table and the verdicts")
    parser.add_argument("--csv", metavar="FILE", help="one row per run ('-' prints it)")
    parser.add_argument("--json", metavar="FILE", help="judged numbers and all curves ('-' prints it)")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also a small picture of the page (needs Chromium)")
    parser.add_argument(
        "--figure", metavar="NAME", help="of one figure only: forest, response, waterfall, bits, length, … (--picture)"
    )
    parser.add_argument("--baseline", help="block or group to compare with (standard, else the first)")
    parser.add_argument(
        "--metric", help="the loss to judge, e.g. val/bits_per_byte (test before val, bits before loss)"
    )
    parser.add_argument(
        "--margin", type=float, help="differences below this do not matter, in the loss's unit (0.005 bits per byte)"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds planned per group: no verdict before, and looking costs nothing"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="rewrite the page every so many seconds (10) until Ctrl-C; the open page loads itself again",
    )
    parser.set_defaults(run=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Carry out the verb; returns the exit code."""
    if arguments.watch is not None and arguments.watch <= 0:
        raise UserError(f"--watch {arguments.watch:g}: give a positive number of seconds")
    for name, least in (("margin", 0.0), ("seeds", 1)):
        value = getattr(arguments, name)
        if value is not None and value <= least:
            raise UserError(f"--{name} {value:g}: give a number above {least:g}")
    if arguments.figure and not arguments.picture:
        raise UserError(f"--figure {arguments.figure}: say where the picture goes with --picture FILE.png")
    only_data = arguments.text or arguments.csv or arguments.json
    if arguments.out is None and (arguments.watch or arguments.picture or not only_data):
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
    from polarlm.report.page import write_page
    from polarlm.report.payload import build_payload
    from polarlm.report.picture import write_picture
    from polarlm.report.tables import csv_report, json_report, text_report
    from polarlm.runs.reading import find_run_folders, read_runs
    from polarlm.verdict.groups import group_runs
    from polarlm.verdict.judgement import judge_groups
    from polarlm.verdict.looks import Looks

    groups = group_runs(read_runs(find_run_folders(arguments.runs), cache))
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
    trouble = looks.record(judgement.looked)
    if trouble:
        print(f"warning: {trouble}", file=sys.stderr)
    out = Path(arguments.out).absolute() if arguments.out else None
    if arguments.text:
        print(text_report(judgement, min(120, shutil.get_terminal_size((120, 24)).columns)))
    if arguments.csv:
        _emit(arguments.csv, csv_report(groups))
    if out or arguments.json:
        payload = build_payload(groups, judgement, out, reload_seconds)
        if arguments.json:
            _emit(arguments.json, json.dumps(json_report(judgement, payload), allow_nan=False) + "\n")
        if out:
            write_page(groups, judgement, payload, out)
            count = sum(len(group.runs) for group in groups)
            print(f"{arguments.out}: {count} runs, {out.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
            if arguments.picture and reload_seconds is None:
                write_picture(out, arguments.picture, arguments.figure)
                print(arguments.picture, file=sys.stderr)


def _emit(target: str, text: str) -> None:
    from polarlm.runs.files import write_text

    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(target).absolute(), text)
