"""The asyncrlhf command."""
