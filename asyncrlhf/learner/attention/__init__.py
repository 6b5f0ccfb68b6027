"""Attention over packed sequences: without padding, with windows, caps and sinks, and around a ring of ranks."""

DOORS = ("attention", "ring", "tiles")
