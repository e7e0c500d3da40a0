"""A run of several processes, each started with the environment that torchrun's agent gives it.

The agent's own store is kept here, in the test's process; as with torchrun, when one rank ends badly the others are
ended too.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from tests.faults.killing import run

PRELOAD = [
    "torch", "lightning.pytorch", "polarlm.training.loop", "polarlm.training.fit", "polarlm.training.module",
    "polarlm.training.checkpointing", "polarlm.training.incidents", "polarlm.evaluation.generate",
    "polarlm.training.sharding", "torch.distributed.fsdp",
]  # fmt: skip


def _rank(environment: dict[str, str], *arguments: Any) -> None:
    os.environ.update(environment)
    run(*arguments)


class Ranks:
    """The processes of one start of a run."""

    def __init__(
        self,
        config: dict[str, Any],
        count: int,
        log: Path,
        kill_at: str | None = None,
        kill_rank: int = 0,
        notes: str = "",
    ) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.log = log
        self.processes = []
        for rank in range(count):
            place = self._environment(rank, count) if count > 1 else {}
            where = log.with_suffix(f".{rank}.txt")
            arguments = (config, str(where), kill_at if rank == kill_rank else None, notes if rank == 0 else None)
            self.processes.append(context.Process(target=_rank, args=(place, *arguments)))
        for process in self.processes:
            process.start()

    def _environment(self, rank: int, count: int) -> dict[str, str]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
        numbers |= {"MASTER_PORT": self.store.port, "TORCHELASTIC_RESTART_COUNT": 0}
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {name: str(number) for name, number in numbers.items()} | agent

    def join(self, seconds: float = 240, kill_after: tuple[int, float] | None = None) -> list[int | None]:
        """Exit codes; `kill_after` (rank, seconds) kills that rank then. When one rank fails, the others are killed."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            codes = [process.exitcode for process in self.processes]
            if kill_after and time.monotonic() - began > kill_after[1] and codes[kill_after[0]] is None:
                self.processes[kill_after[0]].kill()
                kill_after = None
            if None not in codes or any(codes):
                break
            time.sleep(0.02)
        self.end()
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        """Kill whoever is left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def told(self) -> str:
        """The end of what the ranks printed."""
        files = [self.log.with_suffix(f".{rank}.txt") for rank in range(len(self.processes))]
        return "\n".join(file.read_text()[-3000:] for file in files if file.exists())
