"""Before the first step: where a run begins, what is checked before any actor starts, what a signal means."""

DOORS = ("interruption", "origin", "preflight")
