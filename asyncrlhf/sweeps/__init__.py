"""Grids of runs: their jobs, where and in which order these run, and their common results."""
