"""Train one run, or a sweep of them: `python train.py --help`. Installed, the same is `polarlm train`."""

from polarlm.launch.entry import train

if __name__ == "__main__":
    train()
