"""What a training run would need on GPUs that are not here: memory, communication, time (`polarlm inspect --plan`)."""
