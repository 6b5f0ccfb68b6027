"""Benchmarks of ``asyncrlhf bench``: ratios, measured alternately in one call. Those of one experiment live in
``experiments/``.
"""

DOORS = ("checkpoint",)
