"""Reward functions: task rules and a user's own."""
