"""`polarlm tune`: search one number (a learning rate) with Optuna; runs that fall behind are stopped early.

Every trial is a run of its own; the study lies in the sweep's folder, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

POLL = 0.5  # seconds between two looks at a trial's metrics
DESCRIPTION = """Optuna proposes values of one number, every value is trained, runs that fall behind are stopped early.
The same command goes on where it was stopped; more --trials add to it. Example:

  polarlm tune block=polar --key optim.lr --low 1e-4 --high 3e-2 --trials 12"""


def add_parser(verbs: Any) -> None:
    """Add `polarlm tune`."""
    parser = verbs.add_parser(
        "tune", help="search a number, for example the learning rate, with Optuna", description=DESCRIPTION
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for train: block=polar experiment=…")
    parser.add_argument("--key", default="optim.lr", help="the number to search (optim.lr)")
    parser.add_argument("--low", type=float, required=True, help="smallest value")
    parser.add_argument("--high", type=float, required=True, help="largest value")
    parser.add_argument("--linear", action="store_true", help="search evenly instead of by factors")
    parser.add_argument("--trials", type=int, default=12, help="runs in all, earlier ones included (12)")
    parser.add_argument("--group", help="the study's name (tune-<key>-<block>)")
    parser.set_defaults(run=tune)


def tune(options: argparse.Namespace) -> int:
    """Run trials until there are enough; prints the best. Exit code 1 when none has finished."""
    if not 0 < options.low < options.high or options.trials < 1:
        raise UserError("--low must be above 0 and below --high, and --trials at least 1")
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise UserError('polarlm tune needs Optuna: pip install "polarlm[search]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    config = trial_config(options, options.low)
    if config["name"] is not None:
        raise UserError("name= would put every trial into one folder; leave it out, --group names the search")
    group = options.group or f"tune-{options.key.rpartition('.')[2]}-{config['choices']['block']}"
    folder = Path(config["runs_dir"]) / ".sweeps" / group
    folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    study = optuna.create_study(
        storage=storage,
        study_name=group,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=config["seed"]),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    )
    same_experiment(study, config, options.key, group)
    State = optuna.trial.TrialState
    for left in study.get_trials(states=(State.RUNNING,)):  # of a search that was killed; its run is continued below
        study.tell(left.number, state=State.FAIL)
        study.enqueue_trial(left.params)
    space: dict[str, Any] = {
        options.key: optuna.distributions.FloatDistribution(options.low, options.high, log=not options.linear)
    }
    while len(study.get_trials(states=(State.COMPLETE, State.PRUNED))) < options.trials:
        try_value(study, study.ask(space), options, group, folder, State)
    done = study.get_trials(states=(State.COMPLETE,))
    if not done:
        print("No trial has finished.", file=sys.stderr)
        return 1
    best = study.best_trial
    print(
        f"best: {options.key}={best.params[options.key]:.6g}, val loss {best.value:.4f}, of {len(done)} finished trials"
    )
    return 0


def same_experiment(study: Any, config: dict[str, Any], key: str, group: str) -> None:
    """Refuse to add trials to a search whose losses mean something else; a new search notes what it is about."""
    from polarlm.runs.identity import differences, experiment_of, flatten

    asked = {"searched": key, **{name: value for name, value in flatten(experiment_of(config)) if name != key}}
    asked = json.loads(json.dumps(asked))
    noted = study.user_attrs.get("experiment")
    if noted is None:
        study.set_user_attr("experiment", asked)
    elif changed := differences(noted, asked):
        raise UserError(
            f"The search {group} was begun with other settings ({'; '.join(changed[:3])}), and its losses cannot be "
            "compared with new ones: repeat its settings, or choose another --group"
        )


def trial_config(options: argparse.Namespace, value: float) -> dict[str, Any]:
    """The checked configuration of a trial."""
    from polarlm.launch.overrides import config_loader, plan_jobs
    from polarlm.launch.train import size_name

    settings = [*options.settings, f"{options.key}={value:.6g}"]
    (job,) = plan_jobs(config_loader(), "train", settings, multirun=False).jobs
    assert job.config is not None
    choices = job.config["choices"]
    choices["model"] = size_name(job.config["model"], choices["model"])
    return job.config


def try_value(study: Any, trial: Any, options: argparse.Namespace, group: str, folder: Path, state: Any) -> None:
    """One run: report every validation, stop when the pruner says so, tell the study how it ended."""
    from polarlm.launch.processes import start_job, stop_job
    from polarlm.runs.files import read_json
    from polarlm.runs.identity import default_name
    from polarlm.runs.sweeps import RESULT_VARIABLE, SWEPT_VARIABLE

    value = trial.params[options.key]
    config = trial_config(options, value)
    log, result = folder / f"trial-{trial.number:03d}.log", folder / f".trial-{trial.number:03d}"
    metrics = Path(config["runs_dir"]) / default_name(config) / "metrics.jsonl"
    environment = {RESULT_VARIABLE: str(result.resolve()), SWEPT_VARIABLE: options.key}
    job = start_job([*options.settings, f"{options.key}={value:.6g}", f"group={group}"], environment, log)
    title, began = f"trial {trial.number}: {options.key}={value:.6g}", time.monotonic()
    try:
        seen = -1
        while job.poll() is None:
            time.sleep(POLL)
            for step, loss in validations(metrics):
                if step > seen:
                    trial.report(loss, step)
                    seen = step
            if seen >= 0 and trial.should_prune():
                stop_job(job)
                study.tell(trial, state=state.PRUNED)
                print(f"{title}: stopped at step {seen}, behind the others", file=sys.stderr, flush=True)
                return
    finally:
        stop_job(job)
    if job.returncode or not result.exists():
        study.tell(trial, state=state.FAIL)
        raise UserError(f"{title} failed; its log says why: {log}")
    loss = float(read_json(Path(result.read_text(encoding="utf-8")) / "summary.json")["val/loss"])
    study.tell(trial, loss)
    print(f"{title}: val loss {loss:.4f} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)


def validations(metrics: Path) -> list[tuple[int, float]]:
    """(step, validation loss) of every whole row so far."""
    from polarlm.runs.files import json_lines

    return [
        (int(row["step"]), row["val/loss"]) for row in json_lines(metrics) if isinstance(row.get("val/loss"), float)
    ]
