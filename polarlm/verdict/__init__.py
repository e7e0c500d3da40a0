"""Is one block better than another: statistics of seeds, fair budgets, and the judgement of whole sweeps."""
