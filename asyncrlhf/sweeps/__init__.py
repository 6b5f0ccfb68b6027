"""Grids and searches of runs: their jobs, where and in which order these run, and their common results."""

DOORS = ("plan", "record", "results", "run", "sentences", "table")
