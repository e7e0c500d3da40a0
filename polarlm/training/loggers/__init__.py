"""Where a run's numbers go: metrics.jsonl, the loggers that a configuration names, the progress bar, speed."""
