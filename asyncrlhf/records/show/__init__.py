"""What a run shows: the live panel, the summary, W&B and other sinks, the user's callbacks."""

DOORS = ("callbacks", "metric_names", "progress", "sinks", "summary")
