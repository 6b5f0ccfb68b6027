"""Curves and the HTML report of runs, and runs as data frames."""

DOORS = ("frames", "html", "load", "timeline")
