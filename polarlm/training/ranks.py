"""How the processes of one run agree on its folder before they can talk: rank 0 chooses and announces it.

Lightning starts its own processes with rank 0's environment. torchrun starts all at once, so they use the store of
its agent. With SLURM, a file on the shared disk, named after the job step, carries the name.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

FOLDER_VARIABLE = "POLARLM_RUN_DIR"
STARTER_VARIABLE = "POLARLM_RANK_0"  # the process that started the other ranks, where Lightning does
WAIT_SECONDS = 600  # rank 0 may first have to prepare the corpus


def is_first() -> bool:
    """Whether this process is rank 0."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ and (name != "SLURM_PROCID" or _slurm()):
            return int(os.environ[name]) == 0 and (name != "LOCAL_RANK" or os.environ.get("NODE_RANK", "0") == "0")
    return os.environ.get("NODE_RANK", "0") == "0"


def share_folder(folder: Path) -> None:
    """Rank 0: announce the run folder to the other processes."""
    os.environ[FOLDER_VARIABLE] = str(folder.resolve())
    os.environ[STARTER_VARIABLE] = str(os.getpid())
    if _torchrun():
        _store().set(_key(), str(folder.resolve()))
    elif _slurm():
        _slurm_file().parent.mkdir(parents=True, exist_ok=True)
        beside = _slurm_file().with_suffix(".tmp")
        beside.write_text(str(folder.resolve()), encoding="utf-8")
        os.replace(beside, _slurm_file())


def shared_folder() -> Path:
    """The other ranks: wait for the run folder that rank 0 has chosen."""
    if _torchrun():
        return Path(_store().get(_key()).decode())
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    until = time.monotonic() + WAIT_SECONDS
    while _slurm() and time.monotonic() < until:
        if _slurm_file().exists():
            return Path(_slurm_file().read_text(encoding="utf-8"))
        time.sleep(0.2)
    raise UserError("Rank 0 did not announce the run folder; start all processes with torchrun, srun or by one")


def end_with_starter() -> None:
    """The other ranks: end when rank 0, which started them, is gone; torchrun and SLURM see to it themselves."""
    starter = os.environ.get(STARTER_VARIABLE)
    if starter is None or _torchrun() or _slurm():
        return

    def wait() -> None:
        while os.getppid() == int(starter):
            time.sleep(0.2)
        os._exit(1)  # without rank 0 nothing can be saved or agreed on

    threading.Thread(target=wait, daemon=True).start()


def forget_folder() -> None:
    """Rank 0: remove the announcement when the run is over."""
    os.environ.pop(FOLDER_VARIABLE, None)
    os.environ.pop(STARTER_VARIABLE, None)
    if _slurm() and not _torchrun():
        _slurm_file().unlink(missing_ok=True)


def cluster_plugins() -> list[Any]:
    """SLURM without Lightning's requeueing, which would save a checkpoint of its own kind and prefer it to ours.

    The signal that announces the end of a job ends training with a checkpoint (training/callbacks.py) instead.
    """
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    return [SLURMEnvironment(auto_requeue=False)] if _slurm() and not _torchrun() else []


def _torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "MASTER_PORT" in os.environ


def _slurm() -> bool:
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ


def _key() -> str:
    return f"polarlm/folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    from torch.distributed import TCPStore

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent serves the store; without it (TORCHELASTIC_USE_AGENT_STORE unset) rank 0 would have to.
    return TCPStore(*place, is_master=False, timeout=timedelta(seconds=WAIT_SECONDS))


def _slurm_file() -> Path:
    step = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return Path.cwd() / "runs" / ".slurm" / step
