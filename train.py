"""Train one run, or a sweep of them: `python train.py --help`."""

from omegaconf import DictConfig

from polarlm.launch.entry import run


def main(cfg: DictConfig) -> float:
    """One run; returns its validation loss, which sweepers may minimise."""
    from polarlm.launch.train import train

    return train(cfg)


if __name__ == "__main__":
    run(main, "train")
