"""A run's directory: what is written while it runs (``write``), what is read from it afterwards and proved (``read``),
and what the user sees of it (``show``).
"""

DOORS = (
    "read.cut_short", "read.follow", "read.settings", "read.verify", "show.callbacks", "show.metric_names",
    "show.progress", "show.sinks", "show.summary", "write.attempts", "write.checkpoint", "write.journal",
    "write.record_marker", "write.recorder", "write.rollout_rows", "write.rollout_tokens", "write.run_lock",
    "write.saved_rollouts", "write.spans", "write.status", "write.whole_files",
)  # fmt: skip
