"""The hosts of a run's parts: Ray or one process; typed calls with deadlines, placement on devices, clocks."""

DOORS = (
    "calls",
    "clock",
    "forked_workers",
    "handles",
    "local_runtime",
    "nodes",
    "one_gpu",
    "own_ray",
    "parts",
    "placement",
)
