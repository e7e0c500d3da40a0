"""Verbs that use a trained run: `polarlm generate | export | import | harness`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

RUN = "run folder, or a .ckpt or .safetensors file inside one"


def add_parser(verbs: Any) -> None:
    """Add the verbs."""
    _add_generate(verbs)
    _add_harness(verbs)
    _add_export(verbs)
    p = verbs.add_parser(
        "import",
        help="make a run folder from an exported folder",
        description="Make a run folder of a folder that `export` has written: the same model again.",
    )
    p.add_argument("folder", type=Path, help="a folder written by `polarlm export`")
    p.add_argument("--out", type=Path, required=True, help="the run folder to make, e.g. runs/imported")
    p.set_defaults(run=import_folder)


def _add_harness(verbs: Any) -> None:
    p = verbs.add_parser(
        "harness",
        help="run tasks of lm-evaluation-harness",
        description="Tasks of lm-evaluation-harness; blimp and lambada are read from local files.",
    )
    p.add_argument("folder", metavar="run", help=RUN)
    p.add_argument("--tasks", default="blimp,lambada", help="names, with commas (default blimp,lambada)")
    p.add_argument("--limit", type=int, help="only so many examples of each")
    p.add_argument("--include", type=Path, help="a folder with task yamls of your own")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.set_defaults(run=harness)


def harness(options: argparse.Namespace) -> int:
    """Run the tasks; print their numbers and keep them in the run folder."""
    from importlib.metadata import version

    from polarlm.evaluation.harness import run_tasks
    from polarlm.runs.measurements import write_evaluation
    from polarlm.runs.restore import restore_run

    run = restore_run(options.folder, options.device)
    results = run_tasks(
        run.model, run.tokenizer, options.tasks.split(","), limit=options.limit, include=options.include
    )
    for task, numbers in results.items():
        protocol = {"name": "harness", "data": task, "split": "test", "limit": options.limit}
        protocol |= {"lm_eval": version("lm_eval"), "weights": run.weights.name}
        write_evaluation(run.folder, {"protocol": protocol, "numbers": numbers})
        print(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    return 0


def _add_generate(verbs: Any) -> None:
    p = verbs.add_parser(
        "generate", help="generate text with a trained run", description="Write text with a trained run."
    )
    p.add_argument("folder", metavar="run", help=RUN)
    p.add_argument(
        "--prompt", action="append", help="text to continue (again for several); empty starts a new document"
    )
    p.add_argument("--tokens", type=int, default=200, help="how many tokens to write (default 200)")
    p.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token each time (default 0.8)"
    )
    p.add_argument("--top-k", type=int, default=None, help="sample from the k most likely tokens")
    p.add_argument("--top-p", type=float, default=None, help="sample from the smallest set with this probability")
    p.add_argument(
        "--min-p", type=float, default=None, help="only tokens with this share of the most likely one's probability"
    )
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: what was written becomes less likely"
    )
    p.add_argument("--stop", action="append", default=[], help="end before this text (again for several)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.set_defaults(run=generate)


def generate(options: argparse.Namespace) -> int:
    """Print every prompt and its continuation, as it is written."""
    from polarlm.evaluation.generate import Sampling, stream_text
    from polarlm.runs.restore import restore_run

    sampling = Sampling(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)})
    if options.tokens < 0:
        raise UserError(f"--tokens {options.tokens} is not possible; give how many tokens to write")
    run = restore_run(options.folder, options.device)
    prompts = options.prompt or [""]
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}--- prompt {number + 1} of {len(prompts)}")
        sys.stdout.write(prompt)
        for piece in stream_text(run.model, run.tokenizer, prompt, options.tokens, sampling, stop=options.stop):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    return 0


def import_folder(options: argparse.Namespace) -> int:
    """Make a run folder."""
    from polarlm.runs.export.folder import import_run

    import_run(options.folder, options.out)
    print(f"{options.out}: try polarlm eval checkpoint={options.out}")
    return 0


def _add_export(verbs: Any) -> None:
    p = verbs.add_parser(
        "export",
        help="export a run for transformers, or push it to the Hugging Face hub",
        description="Write a run as a folder that transformers loads without polarlm being installed.",
    )
    p.add_argument("folder", metavar="run", help=RUN)
    p.add_argument("--to", choices=["hf"], default="hf", help="hf: Hugging Face transformers (default)")
    p.add_argument("--out", type=Path, help="the folder to write (default: <run>/export-hf)")
    p.add_argument("--push", metavar="OWNER/NAME", help="also upload it to this repository of the Hugging Face hub")
    p.add_argument("--private", action="store_true", help="with --push: create the repository as a private one")
    p.set_defaults(run=export)


def export(options: argparse.Namespace) -> int:
    """Write the folder, say how to load it, and upload it where that is asked for."""
    from polarlm.runs.export.folder import check_name, export_run, push_folder
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
