"""Rewards: task rules, functions of the user, reward models, judges, remote endpoints, and sums of them."""

DOORS = ("build_scorer", "judge", "model", "program", "reward", "reward_config")
