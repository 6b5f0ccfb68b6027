"""Settings of rewards and of how scoring is fused with generation: ``reward.*`` and ``fusion.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

GRANULARITIES = ("batch", "group", "rollout")


@dataclass(frozen=True)
class RewardConfig:
    """``kind=task``: the task's own rule; ``kind=python``: calls ``target`` (``package.module:function``)."""

    kind: str = "task"
    target: str = ""
    workers: int = 1
    timeout_seconds: float = 30.0  # for one rollout's score
    missing_eos_penalty: float = 0.0  # subtracted when the response was cut off
    overlong_buffer: int = 0  # DAPO's soft over-length penalty (2503.14476): width in tokens, 0 is off

    def __post_init__(self) -> None:
        check_choice("reward.kind", self.kind, ("task", "python"))
        check(
            self.kind != "python" or ":" in self.target,
            "reward.kind=python needs reward.target=package.module:function.",
        )
        check_range("reward.workers", self.workers, low=1)
        check_range("reward.timeout_seconds", self.timeout_seconds, low=0, exclusive_low=True)
        check_range("reward.missing_eos_penalty", self.missing_eos_penalty, low=0)
        check_range("reward.overlong_buffer", self.overlong_buffer, low=0)


@dataclass(frozen=True)
class FusionConfig:
    granularity: str = "rollout"
    max_batch: int = 64  # rollouts in one scoring call
    max_wait_ms: float = 2.0

    def __post_init__(self) -> None:
        check_choice("fusion.granularity", self.granularity, GRANULARITIES)
        check_range("fusion.max_batch", self.max_batch, low=1)
        check_range("fusion.max_wait_ms", self.max_wait_ms, low=0)
