"""Where jobs run: in processes on this machine, or on a cluster through submitit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.errors import UserError, did_you_mean
from polarlm.jobs.engine import Handle, Place
from polarlm.jobs.job import JobSpec, end_group, start_job, stop_job
from polarlm.runs.files import is_alive, json_object, write_json
from polarlm.runs.identity import RESULT_VARIABLE, SWEPT_VARIABLE

SUBMITTED = "submitted.json"  # key of a job → its id on the cluster
OURS = ("_target_", "cluster", "wait", "submitit_folder", "max_num_timeout")  # the rest is the executor's


class Here:
    """N jobs at a time on this machine, each with its share of the cores, and its own GPU where there are several."""

    outlives, waits = False, True

    def __init__(
        self, at_once: int | None = None, threads: int | None = None, gpus: Sequence[str] = (), most: int | None = None
    ) -> None:
        for key, value in (("jobs", at_once), ("threads", threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{key}={value} must be a whole number ≥ 1, or null")
        self.gpus = list(gpus)
        self.at_once, self.threads = share_of_cores(at_once or len(self.gpus) or None, threads, most)
        self._used: dict[int, list[str]] = {}  # process → its GPUs

    def start(self, jobs: Sequence[JobSpec]) -> list[Handle]:
        """Start a process per job."""
        return [self._start(job) for job in jobs]

    def find(self, job: JobSpec) -> Handle | None:
        """None: jobs here end with the process that started them."""
        return None

    def _start(self, job: JobSpec) -> LocalHandle:
        environment = {**job_environment(job), "OMP_NUM_THREADS": str(self.threads)}
        mine = self._least_used(job.devices) if len(self.gpus) > 1 else []
        if mine:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        process = start_job(job.overrides, environment, job.log, job.verb)
        self._used[process.pid] = mine
        return LocalHandle(process, lambda: self._used.pop(process.pid, None))

    def _least_used(self, count: int) -> list[str]:
        busy = [gpu for mine in self._used.values() for gpu in mine]
        return sorted(self.gpus, key=lambda gpu: (busy.count(gpu), self.gpus.index(gpu)))[:count]


class LocalHandle:
    """A process of this machine."""

    seconds: float | None = None

    def __init__(self, process: Any, on_end: Any) -> None:
        self.process, self._on_end = process, on_end

    def poll(self) -> int | None:
        """The exit code; of a job that was killed, the ranks and workers end with it."""
        code: int | None = self.process.poll()
        if code is not None:
            end_group(self.process.pid)
            self._on_end()
        return code

    def stop(self) -> None:
        """Save and end."""
        stop_job(self.process)
        self._on_end()


def job_environment(job: JobSpec) -> dict[str, str]:
    """What a job is told about its sweep, and where it leaves its result."""
    return {SWEPT_VARIABLE: " ".join(job.swept), RESULT_VARIABLE: str(job.result.resolve())}


def share_of_cores(at_once: int | None, threads: int | None, most: int | None = None) -> tuple[int, int]:
    """(jobs at a time, threads of each) for what was asked; by default OMP_NUM_THREADS each, or one job per core.

    `most` jobs are there at all: fewer than there are cores share all of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = threads or (int(given) if given.isdigit() and int(given) else None)
    at_once = at_once or max(1, min(cores // (threads or 1), most or cores))
    return at_once, threads or max(1, cores // at_once)


def visible_gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them; found without importing torch."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20)
        return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
    return []


def gpus_for(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The GPUs to share out; none where every job trains on the CPU."""
    on_cpu = {"trainer=cpu", "trainer.accelerator=cpu"}
    return visible_gpus() if any(on_cpu.isdisjoint(overrides) for overrides in jobs) else []


class Cluster:
    """Jobs in the queue of a cluster: they go on when we leave, and the same command comes back to them."""

    outlives = True
    at_once = 1_000_000  # the queue decides

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise UserError('A cluster needs submitit: pip install "polarlm[cluster]"') from error
        name = str(settings.get("cluster", "slurm"))
        self.folder, self.waits = folder, bool(settings.get("wait", True))
        log = str(settings.get("submitit_folder") or folder / ".submitit" / "%j")
        folder.mkdir(parents=True, exist_ok=True)
        options = {f"{name}_max_num_timeout": settings[key] for key in ("max_num_timeout",) if key in settings}
        shared = {"timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name"}
        shared |= {"stderr_to_stdout"}
        given = {key: value for key, value in settings.items() if key not in OURS and value is not None}
        if name != "slurm":  # the rest is SLURM's
            given = {key: value for key, value in given.items() if key in shared}
        try:
            self.executor = submitit.AutoExecutor(folder=log, cluster=name, **options)
            self.executor.update_parameters(
                **{key if key in shared else f"{name}_{key}": value for key, value in given.items()}
            )
        except (ValueError, RuntimeError, NameError, TypeError) as error:
            raise UserError(f"submitit refuses this launcher: {' '.join(str(error).split())}") from None

    def start(self, jobs: Sequence[JobSpec]) -> list[Handle]:
        """Submit the jobs as one array."""
        work = [ClusterJob(job.overrides, job_environment(job), job.log, job.verb) for job in jobs]
        with self.executor.batch():
            submitted = [self.executor.submit(one) for one in work]
        noted = json_object(self.folder / SUBMITTED)
        noted |= {job.key: one.job_id for job, one in zip(jobs, submitted)}
        write_json(self.folder / SUBMITTED, noted)
        return [ClusterHandle(one) for one in submitted]

    def find(self, job: JobSpec) -> Handle | None:
        """A job that an earlier command submitted and that is still queued or running."""
        number = json_object(self.folder / SUBMITTED).get(job.key)
        if not isinstance(number, str):
            return None
        handle = ClusterHandle(self.executor._executor.job_class(folder=self.executor.folder, job_id=number, tasks=[0]))
        return None if handle.poll() is not None else handle


class ClusterHandle:
    """A job in the cluster's queue."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.seconds: float | None = None

    def poll(self) -> int | None:
        """The exit code of the job's process; 1 where the cluster has lost it."""
        is_running = is_alive(self._orphan) if self._orphan else not self.job.done()
        if is_running and not self.job.paths.result_pickle.exists():
            return None
        with contextlib.suppress(Exception):  # what failed is said by the cluster's own log
            code, self.seconds = self.job.result()
            return int(code)
        return 1

    def stop(self) -> None:
        """Take it out of the queue; a running one saves its state."""
        if self._orphan:
            os.kill(self._orphan, signal.SIGINT)
        else:
            self.job.cancel(check=False)

    @property
    def _orphan(self) -> int | None:
        """The process of submitit's local executor whose submitter has left: submitit itself does not find it again."""
        return int(self.job.job_id) if getattr(self.job, "_process", self) is None else None


class ClusterJob:
    """What a node of the cluster does: start the job's process, and queue again when the job's time is over."""

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str], log: Path, verb: str) -> None:
        self.arguments = list(overrides), dict(environment), log.resolve(), verb
        self.seconds = 0.0  # of earlier attempts

    def __call__(self) -> tuple[int, float]:
        """Run the job; returns (exit code, seconds)."""
        overrides, environment, log, verb = self.arguments
        self._began = time.monotonic()
        self._process = start_job(overrides, environment, log, verb, ignore_usr2=True)
        try:
            # Not process.wait(): `checkpoint` is called in the middle of this, and waits for the process itself.
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    time.sleep(0.1)
            return self._process.wait(), self.seconds + time.monotonic() - self._began
        finally:
            stop_job(self._process)

    def checkpoint(self) -> Any:
        """Called by submitit before the time is over or the job is preempted: save, and queue the same job again."""
        from submitit.helpers import DelayedSubmission

        stop_job(self._process)
        again = ClusterJob(*self.arguments)
        again.seconds = self.seconds + time.monotonic() - self._began
        return DelayedSubmission(again)


def add_place_options(parser: Any) -> None:
    """The options of trial, tune and study that say where their jobs run."""
    parser.add_argument("--jobs", type=int, help="runs at a time (one per GPU, else one per core)")
    parser.add_argument("--threads", type=int, help="threads of each run (OMP_NUM_THREADS, else cores / jobs)")
    parser.add_argument("--retries", type=int, default=0, help="start a job that crashed again, so many times (0)")
    parser.add_argument(
        "--on",
        nargs="+",
        default=["local"],
        metavar=("LAUNCHER", "KEY=VALUE"),
        help="where the jobs run: local, or a file of configs/hydra/launcher: --on slurm partition=gpu",
    )


def chosen_place(options: Any, folder: Path, overrides: Sequence[Sequence[str]]) -> Place:
    """The place that the options of `add_place_options` name."""
    for name, least in (("jobs", 1), ("threads", 1), ("retries", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value} must be at least {least}")
    launcher, *settings = options.on
    if launcher == "local" and not settings:
        return Here(options.jobs, options.threads, gpus_for(overrides))
    return Cluster(folder, cluster_settings(launcher, settings))


def cluster_settings(launcher: str, settings: Sequence[str]) -> dict[str, Any]:
    """A cluster's launcher file in configs/hydra/launcher, with changes."""
    from polarlm.launch.overrides import compose, config_loader, plan_jobs

    loader = config_loader()
    known = [name for name in loader.get_group_options("hydra/launcher") if name not in ("basic", "local", "serial")]
    if launcher not in known:
        near = did_you_mean(launcher, ["local", *known])
        raise UserError(f"--on {launcher} does not exist. {near}Choices: {', '.join(['local', *known])}")
    given = [f"hydra/launcher={launcher}", *(f"hydra.launcher.{text}" for text in settings)]
    plan_jobs(loader, "train", given, multirun=False)  # a wrong key is one sentence
    from omegaconf import OmegaConf

    composed: Any = OmegaConf.to_container(compose(loader, "train", given).hydra.launcher, resolve=False)
    composed.setdefault("cluster", "local" if "Local" in str(composed.get("_target_")) else "slurm")
    composed.pop("submitit_folder", None)  # it may refer to Hydra's sweep, which is not running
    return composed
