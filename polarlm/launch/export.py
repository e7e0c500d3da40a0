"""`polarlm export`: a run as a folder for transformers, with a verdict in its model card; --push uploads it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add the verb `export` to the command line."""
    p = verbs.add_parser(
        "export",
        help="a run as a folder for transformers, or on the Hugging Face hub",
        description="Write a run as a folder that transformers loads without polarlm being installed.",
    )
    p.add_argument("folder", metavar="run", help="run folder, or a .ckpt or .safetensors file inside one")
    p.add_argument("--to", choices=["hf"], default="hf", help="hf: Hugging Face transformers (default)")
    p.add_argument("--out", type=Path, help="the folder to write (default: <run>/export-hf)")
    p.add_argument("--push", metavar="OWNER/NAME", help="also upload it to this repository of the Hugging Face hub")
    p.add_argument("--private", action="store_true", help="with --push: create the repository as a private one")
    p.set_defaults(run=export)


def export(options: argparse.Namespace) -> int:
    """Write the folder, say how to load it, and upload it where that is asked for."""
    from polarlm.runs.export.folder import export_run
    from polarlm.runs.export.hub import check_name, push_folder
    from polarlm.runs.restore import restore_run

    if options.push:
        check_name(options.push)
    run = restore_run(options.folder, "cpu")
    out = options.out or run.folder / "export-hf"
    remote = export_run(run, out, verdict_on(run.folder))
    print(f"{out}: {'a Llama of transformers' if not remote else 'with its own code (trust_remote_code=True)'}")
    argument = ", trust_remote_code=True" if remote else ""
    print(f'  AutoModelForCausalLM.from_pretrained("{out}"{argument})')
    if options.push:
        print(f"pushed: {push_folder(out, options.push, private=options.private)}")
    return 0


def verdict_on(folder: Path) -> str | None:
    """What the runs of the same sweep show about this run's block; None if it was not trained beside others."""
    from polarlm.runs.reading import find_run_folders, read_run, read_runs
    from polarlm.verdict.groups import group_runs
    from polarlm.verdict.judgement import judge_groups

    name = read_run(folder).config.get("group")
    if not name:
        return None
    together = [run for run in read_runs(find_run_folders([folder.parent])) if run.config.get("group") == name]
    groups = group_runs(together)
    if len(groups) < 2:
        return None
    row = next(
        (row for row in judge_groups(groups).rows if folder.resolve() in [r.folder.resolve() for r in row.group.runs]),
        None,
    )
    return row.sentence if row is not None else None
