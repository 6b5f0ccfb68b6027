"""The loops of a run. ``controller.py`` says which loop waits for what, ``state.py`` is what they share; the inner
rooms hold the way of a rollout, the replicas, the learner's loop, the recording, and the start.
"""

DOORS = ("controller", "learning.signs", "rollouts.dispatch", "rollouts.heldout", "run", "start.interruption")
