"""The learner's loop: wait for a batch, train, publish, keep the books; and the way back after a learner's death."""

DOORS = ("bookkeeping", "learn", "normalize", "rollback", "signs")
