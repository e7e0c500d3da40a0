"""`polarlm tune`: search one number (a learning rate) with Optuna; runs that fall behind are stopped early.

Every trial is a run of its own; the study lies in the sweep's folder, so the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from pathlib import Path
from statistics import median
from typing import Any

from polarlm.errors import UserError
from polarlm.jobs.engine import Board, Policy, run_jobs
from polarlm.jobs.job import FINISHED, Ended, JobSpec
from polarlm.jobs.places import add_place_options, chosen_place
from polarlm.runs.files import json_lines
from polarlm.runs.identity import folder_of_run

FEWEST = 3  # finished runs before one can fall behind them
DESCRIPTION = """Optuna proposes values of one setting. Every value is trained; runs that fall behind stop early.
The same command resumes a stopped search; a larger --trials extends it. With --jobs N, N values are proposed at a
time, based on all finished trials. Example:

  polarlm tune block=polar --key optim.lr --low 1e-4 --high 3e-2 --trials 12"""


def add_parser(verbs: Any) -> None:
    """Add `polarlm tune`."""
    parser = verbs.add_parser(
        "tune", help="search a setting, for example the learning rate, with Optuna", description=DESCRIPTION
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for train: block=polar experiment=…")
    parser.add_argument("--key", default="optim.lr", help="the number to search (optim.lr)")
    parser.add_argument("--low", type=float, required=True, help="smallest value")
    parser.add_argument("--high", type=float, required=True, help="largest value")
    parser.add_argument("--linear", action="store_true", help="search evenly instead of by factors")
    parser.add_argument("--trials", type=int, default=12, help="runs in all, earlier ones included (12)")
    parser.add_argument("--group", help="the study's name (tune-<key>-<block>)")
    add_place_options(parser)
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
    )
    same_experiment(study, config, options.key, group)
    Search(study, options, config, group).run()
    State = optuna.trial.TrialState
    finished = len(study.get_trials(states=(State.COMPLETE,)))
    if not finished:
        print("No trial has finished.", file=sys.stderr)
        return 1
    best = study.best_trial
    print(
        f"best: {options.key}={best.params[options.key]:.6g}, val loss {best.value:.4f}, of {finished} finished trials"
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


class Search:
    """Batches of trials: proposed together, trained side by side, told to the study in their order.

    Everything follows from the seed and the trials of earlier batches alone, so a search that was killed, or that goes
    on with more trials, proposes and stops what an uninterrupted one would.
    """

    def __init__(self, study: Any, options: argparse.Namespace, config: dict[str, Any], group: str) -> None:
        self.study, self.options, self.group, self.seed = study, options, group, config["seed"]
        self.folder = Path(config["runs_dir"]) / ".sweeps" / group
        self.place = chosen_place(options, self.folder, [options.settings])
        if study.user_attrs.get("batch") is None:  # the first command decides, whatever later machines can do
            study.set_user_attr("batch", options.jobs or 1)
        self.batch = int(study.user_attrs["batch"])
        self.pruned: dict[str, int] = {}  # key of a job → the step at which it was found to be behind

    def run(self) -> None:
        """Train batches until there are enough trials."""
        import optuna

        State = optuna.trial.TrialState
        # Trials of a killed search are proposed again, and their runs resume.
        for _ in self.study.get_trials(states=(State.WAITING,)):
            self.study.ask()
        for left in self.study.get_trials(states=(State.RUNNING,)):
            self.study.tell(left.number, state=State.FAIL)
        board = Board(max(0, self.options.trials - len(self._over())), self.place.at_once)
        while (done := len(self._over())) < self.options.trials:
            end_of_batch = (done // self.batch + 1) * self.batch
            asked = [self._ask(number) for number in range(done, min(end_of_batch, self.options.trials))]
            jobs = {trial.number: self._job(trial) for trial in asked}
            policy = Policy(stop_on_failure=True, retries=self.options.retries)
            ended = run_jobs(list(jobs.values()), self.place, policy=policy, board=board, watch=self._falls_behind)
            for trial in asked:
                if (how := ended.get(jobs[trial.number].key)) is not None:
                    self._falls_behind(jobs[trial.number])  # also a run that ended before anybody looked
                    self._tell(trial, jobs[trial.number], how)

    def _earlier(self) -> list[Any]:
        """The trials of the batches that are complete: what proposals and early stops may depend on."""
        over = self._over()
        return over[: len(over) // self.batch * self.batch]

    def _over(self) -> list[Any]:
        import optuna

        states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        return self.study.get_trials(deepcopy=False, states=states)

    def _ask(self, number: int) -> Any:
        """The trial of this number: its value follows from the seed, the number and the earlier batches."""
        import optuna

        key, low, high = self.options.key, self.options.low, self.options.high
        space: dict[str, Any] = {key: optuna.distributions.FloatDistribution(low, high, log=not self.options.linear)}
        sampler = optuna.samplers.TPESampler(seed=zlib.crc32(f"{self.seed}/{number}".encode()))
        proposer = optuna.create_study(sampler=sampler)
        proposer.add_trials(self._earlier())
        self.study.enqueue_trial(proposer.ask(space).params)
        return self.study.ask(space)

    def _job(self, trial: Any) -> JobSpec:
        from polarlm.runs.identity import identity_of

        options, value = self.options, trial.params[self.options.key]
        setting = f"{options.key}={value:.6g}"
        config = trial_config(options, value)
        return JobSpec(
            (*options.settings, setting, f"group={self.group}"),
            self.folder / f"trial-{trial.number:03d}.log",
            identity_of(config),
            f"trial {trial.number}: {setting}",
            config["runs_dir"],
            swept=(options.key,),
            devices=config["trainer"]["devices"],
        )

    def _falls_behind(self, job: JobSpec) -> bool:
        """Whether a run is to be stopped: looked at row by row, so that it does not depend on when somebody looks."""
        earlier = [trial.intermediate_values for trial in self._earlier() if trial.state.name == "COMPLETE"]
        rows: dict[int, float] = {}
        for step, loss in self._validations(job) if job.key not in self.pruned else ():
            rows[step] = loss
            if is_behind(rows, earlier):
                self.pruned[job.key] = step
                break
        return job.key in self.pruned

    def _validations(self, job: JobSpec) -> list[tuple[int, float]]:
        """(step, validation loss) of every whole row so far."""
        folder = folder_of_run(job.runs_dir, job.identity)
        rows = json_lines(folder / "metrics.jsonl") if folder else []
        return [(int(row["step"]), row["val/loss"]) for row in rows if isinstance(row.get("val/loss"), float)]

    def _tell(self, trial: Any, job: JobSpec, how: Ended) -> None:
        import optuna

        State, pruned_at = optuna.trial.TrialState, self.pruned.get(job.key)
        for step, loss in self._validations(job):
            if pruned_at is None or step <= pruned_at:
                trial.report(loss, step)
        if pruned_at is not None:
            self.study.tell(trial, state=State.PRUNED)
            print(f"{job.name}: stopped at step {pruned_at}, behind the others", file=sys.stderr, flush=True)
        elif how.status != FINISHED:
            self.study.tell(trial, state=State.FAIL)
            raise UserError(f"{job.name} failed; its log says why: {job.log}")
        else:
            loss = math.inf if how.loss is None or math.isnan(how.loss) else how.loss  # a run that diverged
            self.study.tell(trial, loss)
            print(f"{job.name}: val loss {loss:.4f} ({how.seconds:.0f} s)", file=sys.stderr, flush=True)


def is_behind(rows: dict[int, float], earlier: list[dict[int, float]]) -> bool:
    """Whether a run's best loss so far is above the median of what earlier runs had at its last step (3 or more)."""
    step = max(rows)
    others = [values[step] for values in earlier if step in values]
    return len(earlier) >= FEWEST and bool(others) and min(rows.values()) > median(others)
