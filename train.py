"""Train one run, or a sweep of them: `python train.py --help`."""

import hydra
from omegaconf import DictConfig

from polarlm.launch.entry import job, run


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@job
def main(cfg: DictConfig) -> float:
    """One run; returns its validation loss, which sweepers may minimise."""
    from polarlm.launch.train import train

    return train(cfg)


if __name__ == "__main__":
    run(main)
