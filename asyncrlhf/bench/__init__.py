"""Benchmarks: ratios measured side by side in one call."""
