"""Training. ``torch_backend.py`` is one rank's train step; the inner rooms hold what it calls: ``step`` (from a batch
to a loss), ``model`` (the policy's passes), ``attention``, ``updates`` (from gradients to weights) and ``state``;
``ranks.py`` is how several ranks know of each other.
"""

DOORS = (
    "asleep", "attention.attention", "attention.tiles", "deterministic", "model.forward", "model.inputs",
    "model.model_pass", "ranks", "settings.algorithm", "settings.learner_config", "settings.model_fits",
    "state.checkpoint", "step.companions", "step.plan", "step.token_facts", "step.user_loss", "torch_backend",
    "updates.optimizers",
)  # fmt: skip
