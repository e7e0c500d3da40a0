"""Judge a run from its folder alone: `python eval.py checkpoint=runs/<name>`."""

import hydra
from omegaconf import DictConfig

from polarlm.launch.entry import job, run


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
@job
def main(cfg: DictConfig) -> float:
    """Evaluate one checkpoint; returns its loss."""
    from polarlm.launch.evaluate import evaluate_run

    return evaluate_run(cfg)


if __name__ == "__main__":
    run(main)
