"""The ranks of the learner group: their communication, their mesh, and which part of a tensor each holds."""

DOORS = ("distributed", "spans")
