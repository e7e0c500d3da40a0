"""Judge a run from its folder alone: `python eval.py checkpoint=runs/<name>`."""

from omegaconf import DictConfig

from polarlm.launch.entry import run


def main(cfg: DictConfig) -> float:
    """Evaluate one checkpoint; returns its loss."""
    from polarlm.launch.evaluate import evaluate_run

    return evaluate_run(cfg)


if __name__ == "__main__":
    run(main, "eval")
