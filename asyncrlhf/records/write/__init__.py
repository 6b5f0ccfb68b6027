"""Writes a run's directory: metrics, journal, rollouts, spans and checkpoints, whole or not at all."""

DOORS = (
    "attempts", "checkpoint", "journal", "record_marker", "recorder", "rollout_rows", "rollout_tokens",
    "run_lock", "saved_rollouts", "spans", "status", "whole_files",
)  # fmt: skip
