"""Exception types, with their exit codes on the command line."""

from __future__ import annotations

import errno

from asyncrlhf.shortages import OF_DISKS, SHORTAGES, found_in, smaller


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


class ShortageError(AsyncRLHFError):
    """The machine lacks what the run needs, such as room on its disk; says what, where, and what to do."""


def shortage(error: BaseException | None, folder: object = None) -> str:
    """The sentence for an error caused by what the machine lacks, also if other errors wrap it; else empty. ``folder``:
    of the run, if it is a run's error: then memory, threads and open files count too, not only its disk."""
    seen: set[int] = set()
    part = ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ShortageError):
            return str(error)
        part = next((note[3:] for note in getattr(error, "__notes__", ()) if note.startswith("in ")), part)
        # Our other errors may quote a reward function, whose disk and memory are not the run's.
        quotes = isinstance(error, AsyncRLHFError) and not isinstance(error, CheckpointError)
        code = error.errno if isinstance(error, OSError) else None
        if code not in SHORTAGES and not quotes:
            code = errno.ENOMEM if isinstance(error, MemoryError) else found_in(str(error))
        file = error.filename if isinstance(error, OSError) else None
        counts = code in OF_DISKS or (code in SHORTAGES and folder is not None)
        if code is not None and counts and (file or code != errno.EIO):  # a terminal that is gone has EIO, too
            return _lacking(code, file or (folder if code in OF_DISKS else None), part, str(error) or "MemoryError")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def _lacking(code: int, file: object, part: str, said: str) -> str:
    what, _, helps = SHORTAGES[code]
    verb = "written" if code in OF_DISKS else "opened"
    where = f": {file} could not be {verb}" if file else f"{f' in {part}' if part else ''} ({' '.join(said.split())})"
    helps = helps.format(part=smaller(part))
    return f"{what}{where}. What was written is kept; {helps}, checkpoint.resume=auto goes on."


def failure_sentence(error: BaseException) -> str:
    """One line for the summary and the terminal: the cause first."""
    if lacks := shortage(error):
        return lacks
    text, kind = str(error).strip().splitlines()[:1], type(error).__name__
    if isinstance(error, AsyncRLHFError):
        return text[0] if text else kind
    notes = "; ".join(getattr(error, "__notes__", ()))  # such as the part that raised it
    return ": ".join([kind, *text]) + (f" ({notes})" if notes else "")
