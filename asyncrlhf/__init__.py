"""asyncrlhf: asynchronous off-policy RLHF whose staleness is bounded, corrected and accounted for."""

__version__ = "0.1.0"
