"""What a run writes of itself: each ended rollout once, the spans of its parts, its own state for a resume."""

DOORS = ("resume", "rollout_log")
