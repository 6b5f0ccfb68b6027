"""Settings of weight transfer: ``weights.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check_choice, check_range

TRANSPORTS = ("auto", "collective", "object_store", "local")


@dataclass(frozen=True)
class WeightsConfig:
    """``transport=auto``: ``local`` in the local runtime, ``collective`` under Ray."""

    transport: str = "auto"
    publish_every: int = 1  # learner steps
    bucket_mb: float = 32.0
    audit_every: int = 50  # publishes; 0 audits at start-up only
    audit_tolerance: float = 0.0  # mean |log-prob difference|; 0 chooses by dtype: 1e-3 float32, 0.1 otherwise
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_choice("weights.transport", self.transport, TRANSPORTS)
        check_range("weights.publish_every", self.publish_every, low=1)
        check_range("weights.bucket_mb", self.bucket_mb, low=0, exclusive_low=True)
        check_range("weights.audit_every", self.audit_every, low=0)
        check_range("weights.audit_tolerance", self.audit_tolerance, low=0)
        check_range("weights.timeout_seconds", self.timeout_seconds, low=0, exclusive_low=True)
