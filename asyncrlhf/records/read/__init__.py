"""Reads a run's directory: its history, its rollouts, and whether it kept its guarantees."""

DOORS = ("cut_short", "follow", "settings", "verify")
