"""The planned memory of a training step against the resident memory of a process that takes it.

python -m benchmarks.plan                      all rows, one process each
python -m benchmarks.plan polar 256 16         one: block, context, windows; prints planned and resident MB
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

from benchmarks.memory import resident
from benchmarks.timing import table

ROWS = (
    ("standard", 256, 16), ("polar", 256, 16), ("polar_paper", 256, 16), ("standard", 1024, 4), ("polar", 1024, 4),
    ("rfa", 512, 8),
)  # fmt: skip
VOCABULARY, MB = 8192, 2**20


def planned_and_resident(block: str, context: int, windows: int) -> tuple[float, float]:
    """MB that the plan expects for a step of model=small, and MB that the process has grown by at most."""
    import torch

    from polarlm.fast import passes
    from polarlm.launch.overrides import config_loader, plan_jobs
    from polarlm.model import GPT
    from polarlm.model.build import build_model
    from polarlm.training.memory import Shape, device_memory, step_memory
    from polarlm.training.optimisers import build_optimiser

    vars(passes)["takes_pass"] = lambda x: False  # torch's own operators, which the plan counts and a GPU uses
    settings = [f"block={block}", "model=small", f"model.context={context}", f"trainer.batch_tokens={context}"]
    config = plan_jobs(config_loader(), "train", settings, multirun=False).jobs[0].config
    assert config is not None

    def build(layers: int) -> GPT:
        other = copy.deepcopy(config)
        other["model"]["n_layer"] = layers
        return build_model(other, VOCABULARY)

    layers = config["model"]["n_layer"]
    step = step_memory(build, layers, rows=windows, precision="32-true", optim=config["optim"], accumulate=1)
    planned = device_memory(step, Shape(0, layers, step.weights), "ddp", 1).peak
    # A short step first: what libraries load at their first use is not the model's.
    for size, length in ((1, 8), (windows, context)):
        before = resident("VmRSS")
        model = build(layers)
        optimiser = build_optimiser(config["optim"], model)
        tokens = torch.randint(0, VOCABULARY, (size, length))
        for _ in range(2):
            model.loss(tokens, tokens).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        del model, optimiser
    return planned / MB, resident("VmHWM") - before


def main() -> None:
    rows = []
    # Freed blocks go back to the system at once: what stays is what is held.
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    for block, context, windows in ROWS:
        command = [sys.executable, "-m", "benchmarks.plan", block, str(context), str(windows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        planned, measured = map(float, done.stdout.split()[-2:])
        shape = {"block": block, "context": context, "windows": windows}
        rows.append({**shape, "planned MB": planned, "resident MB": measured, "ratio": planned / measured})
    print(table(rows, ["block", "context", "windows", "planned MB", "resident MB", "ratio"]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*planned_and_resident(sys.argv[1], *map(int, sys.argv[2:])))
    else:
        main()
