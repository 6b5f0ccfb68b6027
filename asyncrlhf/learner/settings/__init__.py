"""Settings of the algorithm and of the learner, with all that they refuse."""

DOORS = ("algorithm", "learner_config", "model_fits")
