"""Predicts what a run costs: shapes of models and machines, seconds, bytes, closed forms, layouts and their search."""
