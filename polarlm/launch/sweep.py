"""Sweeps for people: the plan at the beginning, one line per job at the end, `polarlm sweep status` in between."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from polarlm.errors import UserError, did_you_mean
from polarlm.visible import fitted, visible_text

_jobs: list[tuple[str, str, str]] = []  # (status, overrides, result) of this process's sweep
_varied: list[str] = []
_planned: list[tuple[str, str]] = []  # (runs_dir, group) of this process's sweep


class SweepReport(Callback):
    """Notes how each job of a sweep ended when it runs in this process; other launchers note their jobs themselves."""

    def __init__(self) -> None:
        self.sweeping = False

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self.sweeping = True

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        if self.sweeping:
            from polarlm.runs.sweeps import key_of

            overrides = list(job_return.overrides or [])
            note_job(job_return, " ".join(text for text in overrides if not _varied or key_of(text) in _varied))


def note_job(result: JobReturn, name: str) -> None:
    """Remember how a job ended, under the settings that tell it from the others."""
    if result.status == JobStatus.COMPLETED:
        _jobs.append(("finished", name, f"val loss {result.return_value:.4f}"))
    else:
        error = result._return_value
        _jobs.append(("failed", name, " ".join(str(error).split())[:200] or type(error).__name__))


def print_sweep_plan(plan: Any, config_name: str) -> None:
    """Say what a sweep is going to do, and keep it for `polarlm sweep status`."""
    from polarlm.runs.identity import identity_of
    from polarlm.runs.sweeps import known_runs, sweep_group, write_plan

    good = [job for job in plan.jobs if job.config is not None]
    _varied[:] = plan.varied
    if config_name != "train" or not good:
        return
    first = good[0].config
    group = str(first["group"] or sweep_group(first, good[0].overrides, set(plan.varied)))
    known = known_runs(first["runs_dir"])
    done = [known.get(identity_of(job.config), (None, {}))[1].get("status") for job in good]
    rows = [
        {"overrides": job.overrides, "identity": "", "refused": str(job.error)}
        if job.config is None
        else {"overrides": job.overrides, "identity": identity_of(job.config)}
        for job in plan.jobs
    ]
    write_plan(first["runs_dir"], group, plan.varied, rows)
    _planned[:] = [(first["runs_dir"], group)]
    counts = [
        f"{key.rpartition('.')[2]} ({len({o for j in plan.jobs for o in j.overrides if o.startswith(key + '=')})})"
        for key in plan.varied
    ]
    finished, begun = done.count("finished"), sum(status not in (None, "finished") for status in done)
    print(f"Sweep {group}: {len(plan.jobs)} jobs, varying {', '.join(counts) or 'nothing'}", file=sys.stderr)
    where = "" if first["runs_dir"] == "runs" else f" --runs {first['runs_dir']}"
    print(f"  {finished} already finished, {begun} to continue, {len(good) - finished - begun} new", file=sys.stderr)
    print(f"  look from another terminal with: polarlm sweep status {group}{where}", file=sys.stderr)
    for job in plan.jobs:
        if job.error is not None:
            print(fitted(f"  will fail: {job.error}", sys.stderr), file=sys.stderr)
    print_estimate(plan, [job.config for job, state in zip(good, done) if state != "finished"])


def print_estimate(plan: Any, configs: list[Any]) -> None:
    """How long the jobs that are left will take on this machine, where that is worth measuring."""
    from polarlm.launch.estimate import seconds_of_jobs, side_by_side
    from polarlm.training.loggers.short_numbers import clock

    place = side_by_side(plan.overrides)
    if place is None or not configs:
        return
    jobs, threads = place
    try:
        seconds = seconds_of_jobs(configs, threads)
    except UserError:
        return  # a job that cannot be built says so itself
    if seconds:
        longest = max(sum(seconds) / jobs, *seconds) if len(seconds) > 1 else seconds[0]
        print(
            f"  about {clock(longest)} of training, {jobs} at a time (a few measured steps; validation comes on top)",
            file=sys.stderr,
        )


def failed_jobs() -> UserError | None:
    """What to say about a sweep of which jobs failed; their own messages are in its summary."""
    failed = sum(status == "failed" for status, _, _ in _jobs)
    return (
        UserError(f"{failed} of {len(_jobs)} jobs failed; the same command runs only those again") if failed else None
    )


def print_sweep_summary() -> None:
    """Print one line per job, so that no failure scrolls away unseen; Hydra's own hook is not called after one.

    Jobs that a cluster ran noted nothing here: they are told from their run folders.
    """
    if not _jobs:
        for runs_dir, group in _planned:
            print("", file=sys.stderr)
            print_states(runs_dir, group, sys.stderr)
        return
    failed = sum(status == "failed" for status, _, _ in _jobs)
    width = max(len(overrides) for _, overrides, _ in _jobs)
    print(f"\nSweep: {len(_jobs) - failed} finished, {failed} failed", file=sys.stderr)
    for status, overrides, text in _jobs:
        print(f"  {status:8}  {overrides:{width}}  {text}", file=sys.stderr)


def add_parser(verbs: Any) -> None:
    """Add `polarlm sweep status`."""
    sweep = verbs.add_parser(
        "sweep",
        help="how a sweep is doing: sweep status GROUP",
        description="How a sweep is doing, from any terminal. It is started with: polarlm train -m …, or sweep=NAME",
    )
    actions = sweep.add_subparsers(title="actions", metavar="action", required=True)
    status = actions.add_parser("status", help="jobs done, running, failed and waiting", description="A sweep's jobs.")
    status.add_argument("group", help="the sweep's name (its plan names it; a named sweep has its own)")
    status.add_argument("--runs", default="runs", help="the folder the runs are in (runs)")
    status.set_defaults(run=show_status)


def show_status(options: argparse.Namespace) -> int:
    """Print every planned job with its state; exit code 1 while something is missing."""
    return 0 if set(print_states(options.runs, options.group, sys.stdout)) == {"finished"} else 1


def print_states(runs_dir: str, group: str, out: Any) -> list[str]:
    """One line per planned job from what its run folder says; returns the states."""
    from polarlm.runs.lock import writer_is_gone
    from polarlm.runs.sweeps import key_of, known_runs, read_plan

    plan = read_plan(runs_dir, group)
    if plan is None:
        names = sorted(p.parent.name for p in Path(runs_dir).glob(".sweeps/*/plan.json"))
        near = did_you_mean(group, names)
        raise UserError(f"No sweep '{group}' in {runs_dir}. {near}Sweeps: {', '.join(names) or 'none'}")
    known = known_runs(runs_dir)
    rows = []
    for job in plan["jobs"]:
        folder, summary = known.get(job["identity"], (None, {}))
        name = " ".join(text for text in job["overrides"] if key_of(text) in plan["varied"])
        loss = summary.get("val/loss")
        result = f"val loss {loss:.4f}" if loss is not None else str(summary.get("error", ""))[:80]
        if "refused" in job:
            rows.append(("refused", name, visible_text(str(job["refused"])), ""))
            continue
        state = summary.get("status", "waiting")
        if state == "running" and folder is not None and writer_is_gone(folder):
            state, result = "killed", "the same command continues it"
        rows.append((state, name, result, folder.name if folder else ""))
    width, states = max(len(name) for _, name, _, _ in rows), [row[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"{plan['group']}: {counts}", file=out)
    for state, name, result, place in rows:
        print(f"  {state:11}  {name:{width}}  {result:18}  {place}".rstrip(), file=out)
    return states
