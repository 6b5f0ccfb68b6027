"""One learner step, from a batch to a loss: the plan of microbatches, the targets, the loss, and the metrics. The wall
decides before the first step how a model's sequences pass.
"""

DOORS = (
    "companions", "loss", "metrics", "passes", "plan", "routing_replay", "targets", "token_facts", "user_loss", "wall",
)  # fmt: skip
