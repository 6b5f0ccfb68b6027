"""Settings of weight transfer: ``weights.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check_choice, check_range

TRANSPORTS = ("auto", "collective", "object_store", "local")


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
    """``transport=auto``: ``local`` in the local runtime, ``collective`` under Ray."""

    transport: str = "auto"
    publish_every: int = 1  # learner steps
    bucket_mb: float = 32.0
    audit_every: int = 50  # publishes; 0 audits at start-up only
    audit_tolerance: float = 0.0  # mean |log-prob difference|; 0: 1e-3, in half precision 1 if all arrived
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_choice("weights.transport", self.transport, TRANSPORTS)
        check_range("weights.publish_every", self.publish_every, low=1)
        check_range("weights.bucket_mb", self.bucket_mb, low=0, exclusive_low=True)
        check_range("weights.audit_every", self.audit_every, low=0)
        check_range("weights.audit_tolerance", self.audit_tolerance, low=0)
        check_range("weights.timeout_seconds", self.timeout_seconds, low=0, exclusive_low=True)
