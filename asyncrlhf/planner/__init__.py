"""Formulas for seconds, bytes and staleness, and the choice among layouts. Imports no other room but ``types``."""

DOORS = ("choose", "costs", "explain", "fit", "layout", "ranking", "shapes", "tables")
