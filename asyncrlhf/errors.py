"""Exception types: what went wrong, and which exit code the command line gives it."""

from __future__ import annotations


class AsyncRLHFError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(AsyncRLHFError):
    """A wrong setting or input: one sentence that says what, where and what is allowed. Exit code 2."""

    exit_code = 2


class ContradictionError(ConfigError):
    """Two settings that exclude each other: a sweep that crosses them leaves the cell out."""


class StaleBatchError(AsyncRLHFError):
    """A token older than ``async.max_staleness`` was about to reach a loss: a bug, never a setting."""


class LedgerError(AsyncRLHFError):
    """A rollout was about to be lost, invented or trained twice."""


class WeightSyncError(AsyncRLHFError):
    """Weights did not arrive, or arrived wrong; names the receiver or the tensor."""


class ReplicaError(AsyncRLHFError):
    """A generator, reward worker or learner rank died or stopped answering; names it."""


class LearnerLostError(ReplicaError):
    """A learner rank died or stopped answering: the group is started again from the newest checkpoint."""


class CheckpointError(AsyncRLHFError):
    """A checkpoint could not be written or read."""


class RewardError(AsyncRLHFError):
    """A reward could not be computed for one rollout; the rollout fails, the run goes on."""


class StallError(AsyncRLHFError):
    """Nothing moved for too long; names the waiting part and the rollout ids it waits for."""
