"""Judge a run from its folder alone: `python eval.py checkpoint=runs/<name>`. Installed: `polarlm eval`."""

from polarlm.launch.entry import evaluate

if __name__ == "__main__":
    evaluate()
