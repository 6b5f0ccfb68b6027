"""What a run leaves behind and shows: metrics, rollouts, summary, checkpoints, progress, W&B."""
