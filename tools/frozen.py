"""Numbers that a refactoring must not change: `make frozen` computes them again and compares them bit for bit.

Every row of tools/frozen.json is one case: losses of 50 training steps and all gradients of the first, of each block on
its reference and its fast path; logits of cached decoding; a training run, the same run killed and resumed, its
evaluation, and a run of two processes. A hash covers every bit of these numbers; the loss beside it is for people.

Bits depend on the processor and on torch's build. On another machine than the one named in the table, losses are
compared within a tolerance, and `make frozen ARGS="--base COMMIT"` computes both sides here and compares bits again.
A change that must change numbers says so in its commit and freezes only the cases it names: `--write CASE…`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "frozen.json"
TEXT = ROOT / "LICENSE"  # a real text that never changes
STEPS = 50
ELSEWHERE = 2e-3  # how far a final loss may be off on another processor, in nats
AMPLIFIES = {"block/polar_literal": 0.3, "block/polar_irls": 0.3}  # training itself amplifies rounding in these blocks

Case = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make frozen", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these (a name or its beginning)")
    parser.add_argument("--write", action="store_true", help="freeze the named cases (all: --write with no name)")
    parser.add_argument("--base", metavar="COMMIT", help="compare with that commit, computed here, not with the table")
    parser.add_argument("--out", type=Path, default=TABLE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"cases": {}}
    frozen = computed_by(options.base, options.cases) if options.base else known
    current = dict(compute(options.cases))
    if not current:
        print(f"No case begins with {' or '.join(options.cases)}; the table has: {', '.join(known['cases'])}")
        return 2
    if options.write:
        cases, place = current, machine()
        if options.cases and known["cases"]:  # the others keep the machine that they were frozen on
            place = known["machine"]
            own = {} if place == machine() else {"machine": machine()}
            cases = {**known["cases"], **{name: {**case, **own} for name, case in current.items()}}
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in sorted(cases.items()))
        options.out.write_text(f'{{"machine": {json.dumps(place)},\n "cases": {{\n{rows}\n}}}}\n')
        print(f"Froze {len(current)} cases in {options.out}.")
        return 0
    return report(frozen, current, wanted(frozen["cases"], options.cases))


def report(frozen: dict[str, Any], current: dict[str, Case], names: list[str]) -> int:
    """Print what differs; 1 when anything does."""
    same_machine = frozen["machine"] == machine()
    if not same_machine:
        print(f"Frozen on {frozen['machine']}, this is {machine()}: losses are compared within {ELSEWHERE}.")
    different = []
    for name in names:
        before, now = frozen["cases"][name], current.get(name)
        if now is None:
            different.append(f"{name}: this case is gone")
        elif before.get("machine", frozen["machine"]) == machine() and before["hash"] != now["hash"]:
            change = now["loss"] - before["loss"]
            different.append(f"{name}: other bits (loss {before['loss']:.6f} → {now['loss']:.6f}, {change:+.1e})")
        elif not abs(now["loss"] - before["loss"]) <= AMPLIFIES.get(name.rpartition("/")[0], ELSEWHERE):
            different.append(f"{name}: loss {before['loss']:.6f} → {now['loss']:.6f}")
    different += [f"{name}: not in the table (freeze it with --write {name})" for name in current if name not in names]
    for line in different:
        print(line)
    print(f"{len(names)} frozen cases: {'all unchanged' if not different else f'{len(different)} differ'}.")
    return int(bool(different))


def wanted(names: Iterable[str], prefixes: list[str]) -> list[str]:
    return [name for name in names if not prefixes or any(name.startswith(prefix) for prefix in prefixes)]


def machine() -> str:
    """What the bits of a result depend on."""
    import torch

    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    processor = model[1] if model else platform.processor()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def computed_by(commit: str, cases: list[str]) -> dict[str, Any]:
    """The table as another commit of this repository computes it on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder, "tree"), Path(folder, "frozen.json")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            # The other commit's own tool: it knows its own names.
            command = [sys.executable, "-m", "tools.frozen", "--write", "--out", str(out), *cases]
            subprocess.run(command, cwd=tree, check=True, stdout=sys.stderr)
            table: dict[str, Any] = json.loads(out.read_text())
            return table
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


# ------------------------------------------------------------------------------------------------ the cases


def compute(prefixes: list[str]) -> Iterable[tuple[str, Case]]:
    """Every wanted case, one after the other."""
    import torch

    from polarlm.block_keys import VARIANTS

    torch.set_num_threads(1)
    names = sorted([*(path.stem for path in (ROOT / "configs" / "block").glob("*.yaml")), *VARIANTS])
    started = time.time()
    for block in names:
        for path in ("fast", "reference"):
            name = f"block/{block}/{path}"
            if wanted([name], prefixes) and (case := trained(block, path)) is not None:
                yield name, case
                print(f"{time.time() - started:6.0f} s  {name}", file=sys.stderr)
        if wanted([f"decode/{block}"], prefixes):
            yield f"decode/{block}", decoded(block)
    if wanted(["run/"], prefixes) or any(prefix.startswith("run/") for prefix in prefixes):
        yield from runs()


def characters() -> Any:
    import torch

    return torch.tensor(list(TEXT.read_bytes()))


def small_model(block: str, path: str) -> tuple[Any, Any]:
    """A fresh model of three layers with grouped heads; `reference` takes nothing from the fast paths."""
    import torch
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from polarlm.block_keys import expanded
    from polarlm.model.build import build_model

    sizes = ["model.d_model=64", "model.n_layer=3", "model.n_head=4", "model.n_kv_head=2", "model.context=48"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("train", expanded([f"block={block}", *sizes])), resolve=True)
    torch.manual_seed(1)
    if path == "reference" and "backend" in config["block"]:
        config["block"]["backend"] = "reference"
    return build_model(config, 256), config


def trained(block: str, path: str) -> Case | None:
    """50 steps of AdamW on the text; the hash covers every loss and every gradient of the first step.

    None for the reference of a block that has no choice of backend.
    """
    import torch

    from polarlm.training.optimisers import build_optimiser

    model, config = small_model(block, path)
    if path == "reference" and "backend" not in config["block"]:
        return None
    optimiser = build_optimiser(config["optim"], model, fused=False)
    text, generator, digest = characters(), torch.Generator().manual_seed(2), hashlib.sha256()
    for step in range(STEPS):
        starts = torch.randint(len(text) - 49, (4,), generator=generator)
        window = torch.stack([text[s : s + 49] for s in starts.tolist()])
        documents = (torch.arange(48) >= 20).long().expand(4, 48) if step % 5 == 4 else None  # two packed texts
        loss = model.loss(window[:, :-1], window[:, 1:], documents=documents)
        loss.backward()
        if step == 0:  # without names, so that a parameter may be called otherwise
            gradients = sorted(bits(p.grad) for p in model.parameters() if p.grad is not None)
            digest.update("".join(gradients).encode())
        digest.update(loss.item().hex().encode())
        optimiser.step()
        optimiser.zero_grad()
    return {"loss": loss.item(), "hash": digest.hexdigest()[:16]}


def decoded(block: str) -> Case:
    """Logits of 24 tokens read one at a time into a cache, after a prompt of 16."""
    import torch

    model, _ = small_model(block, "fast")
    tokens, digest, total = characters()[None, 100:140], hashlib.sha256(), 0.0
    model.eval()
    with torch.no_grad():
        cache = model.new_cache(1, 48)
        for start, stop in [(0, 16), *((i, i + 1) for i in range(16, 39))]:
            logits = model(tokens[:, start:stop], cache=cache)[0, -1]
            digest.update(bits(logits).encode())
            total += torch.nn.functional.cross_entropy(logits, tokens[0, stop]).item()
    return {"loss": total / 24, "hash": digest.hexdigest()[:16]}


def bits(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------- whole runs, as a user starts them

RUN = [
    "block=polar", "data=text", f"data.path={TEXT}", "tokenizer=byte", "model=nano", "model.d_model=64",
    "model.n_layer=2", "model.n_head=4", "model.context=32", "model.dropout=0.1", "trainer.max_steps=60",
    "trainer.batch_tokens=128", "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.compile=false",
    "trainer.val_every=20", "trainer.log_every=1", "trainer.checkpoint_every=20", "logger=none", "sample.tokens=1",
]  # fmt: skip
LOSSES = ("train/loss", "val/loss")


def runs() -> Iterable[tuple[str, Case]]:
    """One run, the same one killed and resumed, its evaluation, and a run of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        common = [*RUN, f"runs_dir={folder}", f"cache_dir={folder}/cache"]
        whole, killed, two = Path(folder, "whole"), Path(folder, "killed"), Path(folder, "two")
        command("train.py", *common, "name=whole")
        yield "run/whole", rows_of(whole)
        kill_after(30, killed, "train.py", *common, "name=killed")
        command("train.py", *common, "name=killed")
        yield "run/killed", rows_of(killed)
        command("eval.py", f"checkpoint={whole}", f"out={folder}/eval.json", f"cache_dir={folder}/cache")
        loss = json.loads(Path(folder, "eval.json").read_text())["val/loss"]
        yield "run/eval", {"loss": loss, "hash": hashed(float(loss).hex())}
        command("train.py", *common, "name=two", "trainer=ddp", "trainer.devices=2")
        yield "run/two_processes", rows_of(two)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}


def command(script: str, *arguments: str) -> None:
    line = [sys.executable, script, *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")


def kill_after(step: int, folder: Path, *arguments: str) -> None:
    """Start a run and kill it without warning once it has written that step."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics, deadline = folder / "metrics.jsonl", time.time() + 300
    while process.poll() is None and time.time() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") > step:
            break
        time.sleep(0.005)
    if process.poll() is not None:
        raise SystemExit(f"The run to kill ended by itself before step {step} was seen")
    process.send_signal(signal.SIGKILL)
    process.wait()


def rows_of(folder: Path) -> Case:
    """The losses in metrics.jsonl, by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(row["step"], key, float(row[key]).hex()) for row in rows for key in LOSSES if row.get(key) is not None]
    final = json.loads((folder / "summary.json").read_text())["val/loss"]
    if not losses or not math.isfinite(final):
        raise SystemExit(f"{folder} has no losses")
    return {"loss": final, "hash": hashed(json.dumps(sorted(set(losses))))}


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
