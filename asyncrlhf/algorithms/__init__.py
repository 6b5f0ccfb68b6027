"""Pure functions on tensors and floats: advantages, importance weights, losses, diagnostics."""
