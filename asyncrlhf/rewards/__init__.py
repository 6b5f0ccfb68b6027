"""Rewards: task rules, functions of the user, reward models, judges, remote endpoints, and sums of them."""
