"""Weights over process groups of their own, NCCL or gloo: sender, receiver, and the line that controls them."""

DOORS = ("receiver", "sender")
