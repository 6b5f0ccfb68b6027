"""Curves and the HTML report of runs."""
