"""The policy as a module that gives log-probs: its inputs, its passes over packed or single sequences, and its parts
on several ranks.
"""

DOORS = (
    "activations", "forward", "halves", "inputs", "loading", "model_pass", "pipeline", "sequence", "tensor_parallel",
    "ulysses",
)  # fmt: skip
