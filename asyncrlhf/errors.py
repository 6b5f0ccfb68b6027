"""Exception types, with their exit codes on the command line."""

from __future__ import annotations

import errno
import re


class AsyncRLHFError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(AsyncRLHFError):
    """A wrong setting or input: one sentence that says what, where and what is allowed. Exit code 2."""

    exit_code = 2


class ContradictionError(ConfigError):
    """Two settings that exclude each other: a sweep leaves out their combinations."""


class StaleBatchError(AsyncRLHFError):
    """A token older than ``async.max_staleness`` was about to reach a loss: a bug, never a setting."""


class LedgerError(AsyncRLHFError):
    """A rollout was about to be lost, invented or trained twice."""


class WeightSyncError(AsyncRLHFError):
    """Weights did not arrive, or arrived damaged; names the receiver or the tensor."""


class ReplicaError(AsyncRLHFError):
    """A generator, reward worker or learner rank died or stopped answering; names it."""


class RefusedStartError(ReplicaError):
    """A part found at its start that it cannot work with its settings or its model: the sentence of a ConfigError."""

    exit_code = ConfigError.exit_code


class LearnerLostError(ReplicaError):
    """A learner rank died or stopped answering: the group is restarted from the newest checkpoint."""


class CheckpointError(AsyncRLHFError):
    """A checkpoint could not be written or read."""


class RewardError(AsyncRLHFError):
    """A reward could not be computed for one rollout; the rollout fails, the run continues."""


class StallError(AsyncRLHFError):
    """No progress for too long; names the waiting part and the rollout ids that it waits for."""


# The messages of Python, Arrow, and Rust (safetensors); torch has none.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|StorageFull")


class DiskFullError(AsyncRLHFError):
    """Nothing more can be written; names the file or the folder."""


def full_disk(error: BaseException | None, folder: object = None) -> str:
    """The sentence for an error caused by a full disk, also if other errors wrap it; else empty. It
    names ``folder`` if the error does not name its file."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DiskFullError):
            return str(error)
        code = error.errno if isinstance(error, OSError) else None
        # Our other errors may quote a reward function, whose disk is not the run's.
        quotes = isinstance(error, AsyncRLHFError) and not isinstance(error, CheckpointError)
        if code in (errno.ENOSPC, errno.EDQUOT) or (not quotes and _FULL.search(str(error))):
            file = error.filename if isinstance(error, OSError) else None
            named = file or folder
            where = f": {named} could not be written" if named else f" ({' '.join(str(error).split())})"
            return f"The disk is full{where}. What was written is kept; with room, checkpoint.resume=auto goes on."
        error = error.__cause__ or error.__context__
    return ""


def failure_sentence(error: BaseException) -> str:
    """One line for the summary and the terminal: the cause first."""
    if full := full_disk(error):
        return full
    text, kind = str(error).strip().splitlines()[:1], type(error).__name__
    if isinstance(error, AsyncRLHFError):
        return text[0] if text else kind
    notes = "; ".join(getattr(error, "__notes__", ()))  # such as the part that raised it
    return ": ".join([kind, *text]) + (f" ({notes})" if notes else "")
