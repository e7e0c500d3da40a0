"""Commands in processes forked from one that has imported Hydra but not torch: two hundred of them in seconds.

Run as a program, it reads one JSON request per line and answers with exit code, processor time and heavy imports.
"""

import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "lightning", "datasets", "wandb", "transformers")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    seconds: float  # of the processor, since other work on the machine must not decide a test
    heavy: list[str]


class Fork:
    """The parent of the forked commands."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, folder: Path, *command: str) -> Done:
        """Run `train.py …`, `eval.py …` or `polarlm …` in a folder."""
        with tempfile.NamedTemporaryFile() as log:
            request = json.dumps({"folder": str(folder), "command": command, "log": log.name})
            print(request, file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline())
            return Done(out=Path(log.name).read_text(), **answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    import polarlm.cli
    import polarlm.launch.entry
    import polarlm.launch.overrides

    loader = polarlm.launch.overrides.config_loader()
    for name in ("train", "eval"):
        polarlm.launch.overrides.compose(loader, name, [])
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(request, writer)
        os.close(writer)
        with os.fdopen(reader) as answer:
            heavy, seconds = json.loads(answer.read() or "[[], 1e9]")
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "seconds": seconds, "heavy": heavy}), flush=True)


def child(request: dict, writer: int) -> None:
    log = os.open(request["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    script, *arguments = request["command"]
    code: object = 1
    try:
        sys.argv = [script, *arguments]
        if script == "polarlm":
            from polarlm.cli import main

            code = main()
        else:
            sys.argv[0] = str(ROOT / script)
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    used = resource.getrusage(resource.RUSAGE_SELF)
    os.write(writer, json.dumps([[m for m in HEAVY if m in sys.modules], used.ru_utime + used.ru_stime]).encode())
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
