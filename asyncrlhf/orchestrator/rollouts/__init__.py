"""The way of a rollout: from a prompt to a replica, through scoring, to a whole group in the buffer."""

DOORS = ("annotate", "assembly", "critics", "dispatch", "episodes", "heldout")
