"""Settings of weight transfer: ``weights.*``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrlhf.validation import check, check_choice, check_range, check_ranges

TRANSPORTS = ("auto", "collective", "object_store", "disk", "local")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Tolerance:
    """Mean |difference| in nats. Up to ``suspicious`` all is well. Beyond it the tensors are compared bit by bit, and
    when all of them arrived it is the engine's rounding, which may go up to ``rounding``."""

    suspicious: float
    rounding: float


EXACT, HALF = Tolerance(1e-3, 1e-3), Tolerance(0.1, 1.0)


def choose_tolerance(asked: float, exact: bool) -> Tolerance:
    """``asked`` is a bound without exceptions; 0 chooses by whether both sides compute in float32.

    In half precision the log-probs of unlikely tokens are as coarse as their logits: 0.1 nats on average is usual.
    """
    if asked > 0:
        return Tolerance(asked, asked)
    return EXACT if exact else HALF


@dataclass(frozen=True)
class WeightsConfig:
    """``transport=auto``: ``local`` in the local runtime, ``collective`` under Ray. ``dtype=auto``: that of the engines
    where all replicas share one, else the learner's own. ``checksum=None``: where weights leave the machine or lie on a
    disk, and with ``delta``; between two cores, passes of XXH3 over the bytes cost a quarter of a publish's bandwidth.
    """

    transport: str = "auto"
    publish_every: int = 1  # learner steps
    bucket_mb: float = 32.0
    dtype: str = "auto"  # of floating tensors on their way
    checksum: bool | None = None  # one a bucket, verified by every receiver
    delta: bool = False  # send only the buckets that changed since the receivers' last version
    disk_path: str = ""  # transport=disk; empty: the run directory's folder `weights`
    audit_every: int = 50  # publishes; 0 audits at start-up only
    audit_tolerance: float = 0.0  # mean |log-prob difference|; 0: 1e-3, in half precision 1 if all arrived
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_choice("weights.transport", self.transport, TRANSPORTS)
        check_range("weights.publish_every", self.publish_every, low=1)
        check_ranges("weights", self, "bucket_mb", "timeout_seconds", low=0, exclusive_low=True)
        check_choice("weights.dtype", self.dtype, DTYPES)
        check_ranges("weights", self, "audit_every", "audit_tolerance", low=0)
        check(
            self.checksum is not False or not self.delta,
            "weights.delta=true finds what changed by the buckets' checksums; it needs weights.checksum=true.",
        )
        check(
            self.transport == "disk" or not self.disk_path,
            f"weights.disk_path={self.disk_path} is read by weights.transport=disk alone, not by {self.transport}.",
        )

    @property
    def verifies(self) -> bool:
        """``checksum``, or what it is by default on one machine."""
        return self.transport == "disk" or self.delta if self.checksum is None else self.checksum

    def beside_the_policy(self, runtime: str) -> WeightsConfig:
        """For what goes to services: as it is, whole, by what needs no group of receivers."""
        kind = "local" if runtime == "local" else "object_store"
        return replace(self, transport=kind, dtype="auto", delta=False, disk_path="")


def resolve_dtype(asked: str, engines: Sequence[str]) -> str:
    """The dtype on the way: ``asked``, or for ``auto`` the one that all ``engines`` compute in. Empty where they differ
    or there are none: the learner's own, which loses nothing.
    """
    if asked != "auto":
        return asked
    return engines[0] if len(set(engines)) == 1 else ""
