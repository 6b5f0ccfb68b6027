"""Training backends and the train step."""
