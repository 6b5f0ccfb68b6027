"""The stages of RLHF around the training run: fine-tuning, preferences, reward models, evaluation."""

DOORS = ("data", "evaluation", "preferences", "reward_model", "sft")
