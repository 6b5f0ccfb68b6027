"""Grids of runs: what is run, in which order and where, and what the results say together."""
