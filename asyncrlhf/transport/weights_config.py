"""Settings of weight transfer: ``weights.*``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrlhf.validation import MONTH, check, check_path, check_settings, setting

TRANSPORTS = ("auto", "collective", "relay", "shared_memory", "cuda_ipc", "object_store", "disk", "local")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DELTAS = ("none", "sparse", "auto")
MAPPED = ("shared_memory", "cuda_ipc")


SLOWEST = 100e6  # bytes/s below which a transfer counts as stuck: a tenth of what slow networks carry


@dataclass(frozen=True)
class Tolerance:
    """Mean |difference| in nats. Up to ``suspicious`` the audit passes. Beyond it the tensors are compared bit by bit;
    if all are equal, the cause is the engine's rounding, which may reach ``rounding``."""

    suspicious: float
    rounding: float


EXACT, HALF = Tolerance(1e-3, 1e-3), Tolerance(0.1, 1.0)


def choose_tolerance(asked: float, exact: bool) -> Tolerance:
    """``asked`` is a strict bound; 0 chooses by whether both sides compute in float32.

    In half precision the log-probs of unlikely tokens are as coarse as their logits: 0.1 nats on average is usual.
    """
    if asked > 0:
        return Tolerance(asked, asked)
    return EXACT if exact else HALF


@dataclass(frozen=True)
class WeightsConfig:
    """How weights are sent from the learner to the generators."""

    transport: str = setting(
        "auto",
        "How weights are sent: over a separate process group (collective), to one replica of each machine, which "
        "passes them on (relay), memory mapped by all processes of one machine (shared_memory), memory of the one GPU "
        "that all share (cuda_ipc), Ray's object store, files (disk), or within one process (local); auto with Ray, if "
        "one rank holds the weights whole: cuda_ipc under cluster=one_gpu, shared_memory if the run starts Ray and all "
        "parts run on CPUs; else collective.",
        choices=TRANSPORTS,
    )
    publish_every: int = setting(1, "Learner steps between two publishes; they add to staleness.", low=1)
    bucket_mb: float = setting(32.0, "Size of one bucket in transfer, in MiB.", low=1e-4, high=10**5)
    dtype: str = setting(
        "auto",
        "Number format in transfer; auto: that of the engines if all are equal, else the learner's.",
        choices=DTYPES,
    )
    # On two cores, XXH3 passes over the bytes cost a quarter of a publish's bandwidth.
    checksum: bool | None = setting(
        None, "A checksum per bucket, verified by every receiver; null: between machines, on a disk, and with delta."
    )
    delta: str = setting(
        "none",
        "What is sent of a version: all (none), the numbers that changed since the one before (sparse), or what took "
        "less time so far (auto).",
        choices=DELTAS,
    )
    disk_path: str = setting("", "transport=disk: the folder; empty is the run directory's folder `weights`.")
    audit_every: int = setting(
        50, "Publishes between two comparisons of engine's and learner's log-probs; 0: at the start only.", low=0
    )
    audit_tolerance: float = setting(
        0.0,
        "Largest mean |log-prob difference| allowed, in nats; 0: 1e-3, or 1 in half precision if all tensors arrived.",
        low=0,
    )
    timeout_seconds: float = setting(
        120.0,
        "Seconds for each answer in the weight transfer; sending weights gets 10 s more a GB.",
        low=1,
        high=MONTH,
    )

    def __post_init__(self) -> None:
        check_path("weights.disk_path", self.disk_path)
        object.__setattr__(self, "disk_path", os.path.expanduser(self.disk_path))
        check_settings("weights", self)
        check(
            self.checksum is not False or not self.sparse,
            f"weights.delta={self.delta} knows by the buckets' checksums what a receiver holds; it needs "
            "weights.checksum=true.",
        )
        check(
            not self.sparse or self.transport not in MAPPED,
            f"weights.delta={self.delta} has nothing to save with weights.transport={self.transport}, by which "
            "receivers load from the learner's own memory; allowed: none, or another transport.",
        )
        check(
            self.transport == "disk" or not self.disk_path,
            f"weights.disk_path={self.disk_path} is used only by weights.transport=disk, not by {self.transport}.",
        )

    def seconds_for(self, nbytes: int) -> float:
        """The time limit for transferring ``nbytes`` bytes."""
        return self.timeout_seconds + nbytes / SLOWEST

    @property
    def verifies(self) -> bool:
        """``checksum``, or its default on one machine."""
        return self.transport == "disk" or self.sparse if self.checksum is None else self.checksum

    @property
    def relay(self) -> bool:
        """Whether one replica of each machine gets the weights, and the others load from its memory."""
        return self.transport == "relay"

    @property
    def sparse(self) -> bool:
        """Whether less than a whole version may be sent."""
        return self.delta != "none"

    def beside_the_policy(self, runtime: str) -> WeightsConfig:
        """The settings for weights sent to services: unchanged dtype, whole, a transport without receiver groups."""
        kind = "local" if runtime == "local" else "object_store"
        return replace(self, transport=kind, dtype="auto", delta="none", disk_path="")


def resolve_dtype(asked: str, engines: Sequence[str]) -> str:
    """The dtype in transfers: ``asked``, or for ``auto`` the one in which all ``engines`` compute. Empty if they differ
    or there are none: the learner's own, which loses nothing."""
    if asked != "auto":
        return asked
    return engines[0] if len(set(engines)) == 1 else ""
