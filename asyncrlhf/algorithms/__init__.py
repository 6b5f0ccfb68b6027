"""The formulas, as pure functions on tensors and floats: advantages, importance weights, losses, diagnostics. No
settings, no files, no Ray.
"""

DOORS = (
    "advantages", "aggregate", "coefficients", "diagnostics", "gates", "heads", "kl", "logprobs", "losses", "masked",
    "statistics", "weights",
)  # fmt: skip
