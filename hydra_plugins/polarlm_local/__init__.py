"""How a sweep's jobs reach the engine. Hydra takes launchers and sweepers only from packages of this name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from polarlm.block_keys import expanded
from polarlm.errors import JobsLeft, UserError
from polarlm.jobs import sweep
from polarlm.jobs.engine import Policy, run_jobs
from polarlm.jobs.job import JobSpec, shown, varying
from polarlm.jobs.places import Cluster, Here, gpus_for
from polarlm.runs.identity import key_of


class EngineLauncher(Launcher):
    """Hands the jobs of a multirun to the engine."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config

    def place(self, folder: Path, jobs: Sequence[Sequence[str]]) -> Any:
        """Where the jobs run."""
        raise NotImplementedError

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job; a failed one does not stop the others, unless jobs.stop_on_failure is set."""
        folder = Path(self.config.hydra.sweep.dir) / sweep.current.group
        overrides = [[text for text in job if key_of(text) != "hydra/launcher"] for job in job_overrides]
        swept = sweep.current.varied or varying(overrides)
        # A block that stands for another with settings has been written out: its settings differ too.
        named_by = {*swept, *(varying(overrides) if len(overrides) > 1 else ())}
        jobs = [
            JobSpec(
                tuple(texts),
                folder / "logs" / f"{number:03d}.log",
                sweep.current.identities.get(tuple(texts), ""),
                shown(texts, named_by),
                str(self.config.get("runs_dir", "runs")),
                verb=str(self.config.hydra.job.config_name),
                swept=tuple(swept),
                devices=int((self.config.get("trainer") or {}).get("devices", 1)),
            )
            for number, texts in enumerate(overrides, start=initial_job_idx)
        ]
        if sweep.current.stop_on_failure and sweep.current.failed:  # in an earlier batch (hydra.sweeper.max_batch_size)
            jobs = []
        place = self.place(folder, overrides)
        if not initial_job_idx:
            sweep.print_estimate(sweep.current.unfinished, place)
        try:
            ended = run_jobs(
                jobs,
                place,
                policy=Policy(sweep.current.stop_on_failure, sweep.current.retries),
                on_end=lambda job, how: sweep.current.note(job.name, how.loss, how.error or None),
            )
        except JobsLeft:
            sweep.current.left = True
            raise
        # Hydra would end the sweep at a job that it knows to have failed: it has no loss, and the summary names it.
        losses = [how.loss if (how := ended.get(job.key)) else None for job in jobs]
        return [
            JobReturn(list(job.overrides), status=JobStatus.COMPLETED, _return_value=math.nan if loss is None else loss)
            for job, loss in zip(jobs, losses)
        ]


class LocalLauncher(EngineLauncher):
    """hydra/launcher=local: N jobs at a time on this machine; hydra/launcher=serial: one."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        try:
            Here(jobs, threads)
        except UserError as error:
            raise UserError(f"hydra.launcher.{error}") from None
        self.jobs, self.threads = jobs, threads

    def place(self, folder: Path, jobs: Sequence[Sequence[str]]) -> Any:
        """Processes that share the cores and GPUs."""
        return Here(self.jobs, self.threads, gpus_for(jobs), most=len(jobs))


class SlurmLauncher(EngineLauncher):
    """hydra/launcher=slurm: jobs in a cluster's queue, which go on when we leave."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in settings.items()}

    def place(self, folder: Path, jobs: Sequence[Sequence[str]]) -> Any:
        """The cluster."""
        return Cluster(folder, self.settings)


class VariantSweeper(BasicSweeper):
    """Hydra's own sweeper, which also knows blocks that are other blocks with other settings (block_keys.VARIANTS).

    It is defined here because Hydra executes its own plugins again before it imports this file: a subclass made
    earlier would extend a class that is no longer the one its methods name.
    """

    @staticmethod
    def split_arguments(overrides: list[Any], max_batch_size: int | None) -> list[list[list[str]]]:
        """The jobs of a sweep, each with its overrides written out."""
        batches = BasicSweeper.split_arguments(overrides, max_batch_size)
        return [[expanded(job) for job in batch] for batch in batches]
