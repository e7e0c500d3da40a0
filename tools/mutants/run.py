"""`python -m tools.mutants.run`: put every bug of the list into a copy of the tree, one at a time, and run its tests.

    --jobs 2            so many at a time (each uses one core)
    --only attention    those whose name, file or description contains this
    --list              show the list and stop
    --trust             the tests are known to pass without a bug (after `make test`): do not run them first
    --again             also those whose file and tests have not changed since the last run

Nothing is changed in place. A bug is killed when its tests fail (or do not end in time) and survives when they pass.
Results are kept in build/mutants/results.jsonl, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.catalogue import ALL
from tools.mutants.mutant import Mutant, Stale

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "mutants"
GOAL = 0.97
TIMEOUT = 900.0  # seconds for the tests of one bug, on a busy machine
# By pytest's exit code; every other one means that a test failed. Tests that are not there notice nothing.
OUTCOMES = {0: "survived", 4: "no tests", 5: "no tests"}
# Imported once and inherited by every child, so that a bug costs its tests and not ten seconds of imports. Nothing of
# polarlm or of the tests may be among them: these come from the copy.
HEAVY = (
    "torch",
    "numpy",
    "scipy.stats",
    "pytest",
    "hypothesis",
    "hydra",
    "omegaconf",
    "lightning.pytorch",
    "tokenizers",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the list; 0 when at least 97 % are killed and none is stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants.run", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", metavar="text")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--trust", action="store_true")
    options = parser.parse_args(arguments)
    chosen = [m for m in ALL if options.only in f"{m.name} {m.file} {m.bug}"]
    if options.list:
        print("\n".join(f"{m.name:32} {m.bug}" for m in chosen))
        return 0
    if not chosen:
        print(f"no mutant contains {options.only!r}", file=sys.stderr)
        return 2
    known = {} if options.again else read_results()
    stale: list[str] = []
    waiting: list[Mutant] = []
    results: list[dict[str, Any]] = []
    for mutant in chosen:
        try:
            mutant.applied(ROOT)
        except Stale as error:
            stale.append(str(error))
            continue
        previous = known.get(mutant.fingerprint(ROOT))
        if previous:
            results.append(previous)
        else:
            waiting.append(mutant)
    with snapshot() as tree:
        failing = set() if options.trust else broken_tests(waiting, tree)
        results += run_all([m for m in waiting if not failing & set(m.tests)], tree, options.jobs)
    return report(chosen, results, stale, failing)


def run_all(waiting: Sequence[Mutant], tree: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Results as they come in; each is written down at once."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    running: dict[Any, tuple[Mutant, Path, float]] = {}
    queue = list(waiting)
    done = 0
    while queue or running:
        while queue and len(running) < jobs:
            mutant = queue.pop(0)
            copy = Path(tempfile.mkdtemp(prefix="mutant-"))
            running[start(mutant, tree, copy)] = (mutant, copy, time.monotonic())
        time.sleep(0.1)
        for process, (mutant, copy, began) in list(running.items()):
            seconds = time.monotonic() - began
            if process.is_alive() and seconds < TIMEOUT:
                continue
            outcome = "timeout" if process.is_alive() else OUTCOMES.get(process.exitcode, "killed")
            stop(process)
            del running[process]
            result = {
                "fingerprint": mutant.fingerprint(tree), "name": mutant.name, "file": mutant.file, "bug": mutant.bug,
                "outcome": outcome, "seconds": round(seconds, 1), "by": killer(copy / "log.txt"),
            }  # fmt: skip
            with open(RESULTS / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            shutil.rmtree(copy, ignore_errors=True)
            done += 1
            print(f"{done:3}/{len(waiting)} {outcome:9} {seconds:5.0f} s  {mutant.name:30} {mutant.bug}", flush=True)
            yield result


def start(mutant: Mutant, tree: Path, copy: Path) -> Any:
    """A process that runs the mutant's tests in a copy of its own."""
    changed = mutant.applied(tree)
    shutil.copytree(tree, copy / "tree")
    (copy / "tree" / mutant.file).write_text(changed, encoding="utf-8")
    return launch(copy / "tree", mutant.tests, copy / "log.txt")


def launch(tree: Path, tests: Iterable[str], log: Path) -> Any:
    """Fork a child that runs pytest in `tree`; its exit code is pytest's."""
    context = multiprocessing.get_context("fork")
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            __import__(name)
    process = context.Process(target=_child, args=(tree, list(tests), log))
    process.start()
    return process


def _child(tree: Path, tests: list[str], log: Path) -> None:
    os.setsid()  # what the tests start dies with this group
    file = open(log, "w", encoding="utf-8")  # noqa: SIM115 (as long as this process lives)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tools", "polarlm", "tests", "benchmarks")]:
        del sys.modules[name]  # the copy's own, not the ones that this program came with
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    os.environ |= {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    import pytest
    import torch

    torch.set_num_threads(1)
    code = pytest.main(["-x", "-q", "--no-header", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def stop(process: Any) -> None:
    """End a child and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.join(5)


def killer(log: Path) -> str:
    """The test that failed first."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].partition(" ")[2] if failed else ""


@contextlib.contextmanager
def snapshot() -> Iterator[Path]:
    """A copy of the files that git knows (or would know) in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        yield Path(folder)


def broken_tests(waiting: Sequence[Mutant], tree: Path) -> set[str]:
    """Tests that fail without any bug; what they would say about a bug is worth nothing."""
    failing = set()
    for test in sorted({test for mutant in waiting for test in mutant.tests}):
        log = tree.parent / f"{tree.name}.log"
        process = launch(tree, [test], log)
        process.join(TIMEOUT)
        if process.is_alive() or process.exitcode != 0:
            print(f"{test} fails without any bug: {killer(log) or 'see pytest'}", file=sys.stderr, flush=True)
            failing.add(test)
        stop(process)
        log.unlink(missing_ok=True)
    return failing


def read_results() -> dict[str, dict[str, Any]]:
    """Earlier results by fingerprint."""
    path = RESULTS / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {row["fingerprint"]: row for row in map(json.loads, lines)}


def report(chosen: Sequence[Mutant], results: Iterable[dict[str, Any]], stale: list[str], failing: set[str]) -> int:
    """Print the share and the survivors; return the exit code."""
    results = list(results)
    killed = [r for r in results if r["outcome"] in ("killed", "timeout")]
    print(f"\n{len(killed)} of {len(results)} small bugs noticed ({len(killed) / max(1, len(results)):.1%})")
    for result in results:
        if result not in killed:
            print(f"  {result['outcome']}: {result['name']} ({result['file']}): {result['bug']}")
    for text in stale:
        print(f"  stale, the list needs an update: {text}")
    for test in sorted(failing):
        print(f"  not used, fails by itself: {test}")
    complete = len(results) == len(chosen)
    return 0 if complete and len(killed) >= GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
