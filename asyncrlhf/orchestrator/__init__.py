"""The loops of a run and their state: dispatch, scoring, assembly, learning, weight sync, recovery."""
