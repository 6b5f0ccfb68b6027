"""Moving weights from the learner to the generators."""
