"""The records of a run and what it shows: metrics, rollouts, summary, checkpoints, progress, W&B."""
