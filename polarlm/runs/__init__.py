"""The run folder as a contract: names and identity, writing, reading, checkpoints, restoring."""
