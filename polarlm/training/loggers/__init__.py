"""Where a run's numbers go: metrics.jsonl (the truth), wandb or trackio beside it, the progress bar, speed."""
