"""Thin Ray actors around the parts."""
