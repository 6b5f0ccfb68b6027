"""The hosts of a run's parts: Ray or one process; handles, placement on devices, clocks."""
