"""Formulas for seconds, bytes and staleness, and searches over layouts. Imports no other room but ``types``."""

DOORS = (
    "callgraph", "choose", "costs", "explain", "fit", "layout", "memory", "ranking", "schedules", "search", "shapes",
    "tables",
)  # fmt: skip
