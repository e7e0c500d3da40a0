"""A sweep before and after its jobs run: its plan, its summary, and `polarlm sweep status`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarlm.errors import JobsLeft, UserError, did_you_mean, typed_command
from polarlm.printing import fitted, visible_text


@dataclass
class Sweep:
    """The sweep of this process: what was planned, and how its jobs ended."""

    runs_dir: str = "runs"
    group: str = ""  # empty where nothing is trained (evaluations)
    varied: list[str] = field(default_factory=list)  # the keys that the command line varies
    identities: dict[tuple[str, ...], str] = field(default_factory=dict)  # overrides → identity
    stop_on_failure: bool = False
    retries: int = 0
    ended: list[tuple[str, str, str]] = field(default_factory=list)  # (status, overrides, result)
    left: bool = False  # jobs are still in a cluster's queue

    unfinished: list[dict[str, Any]] = field(default_factory=list)  # configurations of the jobs that are left

    @property
    def failed(self) -> int:
        return sum(status == "failed" for status, _, _ in self.ended)

    def note(self, name: str, loss: float | None, error: str | None) -> None:
        """Remember how a job ended, under the settings that tell it from the others."""
        if error is not None:
            self.ended.append(("failed", name, " ".join(error.split())[:200]))
        else:
            self.ended.append(("finished", name, "" if loss is None else f"val loss {loss:.4f}"))


current = Sweep()


def print_sweep_plan(plan: Any, config_name: str) -> None:
    """Say what a sweep is going to do, and keep it for `polarlm sweep status`."""
    from polarlm.runs.identity import identity_of, known_runs, sweep_group, write_plan

    good = [job for job in plan.jobs if job.config is not None]
    current.varied = list(plan.varied)
    if config_name != "train" or not good:
        return
    first = good[0].config
    group = str(first["group"] or sweep_group(first, good[0].overrides, set(plan.varied)))
    known = known_runs(first["runs_dir"])
    identities = [identity_of(job.config) for job in good]
    done = [known.get(identity, (None, {}))[1].get("status") for identity in identities]
    rows = [
        {"overrides": job.overrides, "identity": "", "refused": str(job.error)}
        if job.config is None
        else {"overrides": job.overrides, "identity": identity_of(job.config)}
        for job in plan.jobs
    ]
    write_plan(first["runs_dir"], group, plan.varied, rows)
    current.runs_dir, current.group = first["runs_dir"], group
    current.stop_on_failure, current.retries = first["jobs"]["stop_on_failure"], first["jobs"]["retries"]
    if first["resume"] != "never":
        current.identities = {tuple(job.overrides): identity for job, identity in zip(good, identities)}
    counts = [
        f"{key.rpartition('.')[2]} ({len({o for j in plan.jobs for o in j.overrides if o.startswith(key + '=')})})"
        for key in plan.varied
    ]
    finished, begun = done.count("finished"), sum(status not in (None, "finished") for status in done)
    print(f"Sweep {group}: {len(plan.jobs)} jobs, varying {', '.join(counts) or 'nothing'}", file=sys.stderr)
    where = "" if first["runs_dir"] == "runs" else f" --runs {first['runs_dir']}"
    print(f"  {finished} already finished, {begun} to resume, {len(good) - finished - begun} new", file=sys.stderr)
    print(f"  to see the progress from another terminal: polarlm sweep status {group}{where}", file=sys.stderr)
    for job in plan.jobs:
        if job.error is not None:
            print(fitted(f"  will fail: {job.error}", sys.stderr), file=sys.stderr)
    current.unfinished = [job.config for job, state in zip(good, done) if state != "finished"]


def print_estimate(configs: list[Any], place: Any) -> None:
    """How long the jobs that are left will take on this machine, where that is worth measuring."""
    from polarlm.jobs.estimate import seconds_of_jobs
    from polarlm.printing import clock

    if place.outlives or not configs:  # a cluster's machines are not this one
        return
    try:
        seconds = seconds_of_jobs(configs, place.threads)
    except UserError:
        return  # a job that cannot be built says so itself
    if seconds:
        longest = max(sum(seconds) / place.at_once, *seconds) if len(seconds) > 1 else seconds[0]
        print(
            f"  about {clock(longest)} of training, {place.at_once} at a time (a few measured steps; validation comes "
            "on top)",
            file=sys.stderr,
        )


def failed_jobs() -> UserError | None:
    """What to say about a sweep of which jobs failed; their own messages are in its summary."""
    if not current.failed:
        return None
    return UserError(f"{current.failed} of {len(current.ended)} jobs failed; the same command runs only those again")


def print_sweep_summary() -> None:
    """Print one line per job, so that no failure scrolls away unseen, and the command that compares them.

    Jobs in a queue, or that a launcher of the user's own ran, are told from their run folders.
    """
    if current.ended and not current.left:
        width = max(len(overrides) for _, overrides, _ in current.ended)
        finished = len(current.ended) - current.failed
        print(f"\nSweep: {finished} finished, {current.failed} failed", file=sys.stderr)
        for status, overrides, text in current.ended:
            print(visible_text(f"  {status:8}  {overrides:{width}}  {text}"), file=sys.stderr)
    elif current.group:
        print("", file=sys.stderr)
        states = print_states(current.runs_dir, current.group, sys.stderr)
        finished = states.count("finished")
        if current.left:
            print(f"  {JobsLeft()}", file=sys.stderr)
    else:
        return
    if current.group and finished:
        print(f"  Compare them: {compare_command(current.runs_dir, current.group)}", file=sys.stderr)


def compare_command(runs_dir: str, group: str) -> str:
    """What to type to compare the runs of a sweep."""
    start = "polarlm" if typed_command("train").startswith("polarlm") else "python -m polarlm"
    return f"{start} compare {shlex.quote(runs_dir)} --sweep {shlex.quote(group)} --out report.html"


def add_parser(verbs: Any) -> None:
    """Add `polarlm sweep status`."""
    sweep = verbs.add_parser(
        "sweep",
        help="show the progress of a sweep: sweep status GROUP",
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
    from polarlm.jobs.job import shown
    from polarlm.runs.identity import known_runs, read_plan
    from polarlm.runs.lock import writer_is_gone

    plan = read_plan(runs_dir, group)
    if plan is None:
        names = sorted(p.parent.name for p in Path(runs_dir).glob(".sweeps/*/plan.json"))
        near = did_you_mean(group, names)
        raise UserError(f"No sweep '{group}' in {runs_dir}. {near}Sweeps: {', '.join(names) or 'none'}")
    known = known_runs(runs_dir)
    rows = []
    for job in plan["jobs"]:
        folder, summary = known.get(job["identity"], (None, {}))
        name = shown(job["overrides"], plan["varied"])
        loss = summary.get("val/loss")
        result = f"val loss {loss:.4f}" if loss is not None else str(summary.get("error", ""))[:80]
        if "refused" in job:
            rows.append(("refused", name, str(job["refused"]), ""))
            continue
        state = summary.get("status", "waiting")
        if state == "running" and folder is not None and writer_is_gone(folder):
            state, result = "killed", "the same command resumes it"
        rows.append((state, name, result, folder.name if folder else ""))
    width, states = max(len(name) for _, name, _, _ in rows), [row[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(visible_text(f"{plan['group']}: {counts}"), file=out)
    for state, name, result, place in rows:  # the plan and the folders may be somebody else's
        print(visible_text(f"  {state:11}  {name:{width}}  {result:18}  {place}").rstrip(), file=out)
    return states
