"""Many jobs: sweeps, trials, searches and studies through one engine, here or on a cluster."""
