"""Reading rollouts ahead, in chunks, while they are still being generated (``fusion.granularity=chunk``)."""

DOORS = ("outlook", "owners", "readers")
