"""Predicts the cost of a run: model and machine shapes, seconds, bytes, closed forms, layouts and their search."""
