"""The generator replicas: how much each may hold, the weights that it gets, its death and its return."""

DOORS = ("load_times", "pacing", "recovery", "turns", "weight_sync")
