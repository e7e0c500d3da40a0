"""A run of several processes, each started with the environment that torchrun's agent gives it.

The agent's own store is kept here, in the test's process; as with torchrun, when one rank ends badly the others are
ended too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.faults.killing import run
from tests.forks import forks


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

        context = forks()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = [log.with_suffix(f".{rank}.txt") for rank in range(count)]
        self.earlier = [log.stat().st_size if log.exists() else 0 for log in self.logs]  # of an earlier start
        self.processes = []
        for rank in range(count):
            place = self._environment(rank, count) if count > 1 else {}
            arguments = (config, str(self.logs[rank]), kill_at if rank == kill_rank else None)
            self.processes.append(context.Process(target=_rank, args=(place, *arguments, notes if rank == 0 else None)))
        for process in self.processes:
            process.start()

    def _environment(self, rank: int, count: int) -> dict[str, str]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
        numbers |= {"MASTER_PORT": self.store.port, "TORCHELASTIC_RESTART_COUNT": 0}
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {name: str(number) for name, number in numbers.items()} | agent

    def join(self, kill_after: tuple[int, float] | None = None) -> list[int | None]:
        """Exit codes; `kill_after` (rank, seconds) kills that rank then. When one rank fails, the others are killed."""
        began = time.monotonic()
        while True:
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

    def lost_only(self, rank: int) -> bool:
        """Whether the run ended, or nothing was wrong but that `rank` was killed.

        Another rank may notice the broken connection, and fail, before it is killed too.
        """
        codes = [process.exitcode for process in self.processes]
        noticed = [code == 1 and "Connection" in self._text(other) for other, code in enumerate(codes)]
        return codes[rank] in (-9, 0) and all(code in (-9, 0) or noticed[other] for other, code in enumerate(codes))

    def told(self) -> str:
        """The end of what the ranks printed."""
        return "\n".join(self._text(rank)[-3000:] for rank in range(len(self.logs)))

    def _text(self, rank: int) -> str:
        if not self.logs[rank].exists():
            return ""
        return self.logs[rank].read_bytes()[self.earlier[rank] :].decode(errors="replace")
