"""Settings of who computes the critic's old values: ``critic.*``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrlhf.validation import check, check_choice, check_range


@dataclass(frozen=True)
class CriticConfig:
    """``where=learner``: the learner's critic passes over the batch before a step's first update. ``where=service``:
    workers with a copy of it give each rollout its values as it ends. The learner trains the critic either way."""

    where: str = "learner"
    workers: int = 1
    threads: int = 1  # CPU threads of one worker
    gpus: float = 0.0  # GPUs of one worker; 0 runs it on the CPU
    token_budget: int = 16384  # tokens of one call, and padded tokens of one forward pass
    max_restarts: int = 3  # a worker that dies so often in a row is not started again

    def __post_init__(self) -> None:
        check_choice("critic.where", self.where, ("learner", "service"))
        for key in ("workers", "threads", "token_budget"):
            check_range(f"critic.{key}", getattr(self, key), low=1)
        for key in ("gpus", "max_restarts"):
            check_range(f"critic.{key}", getattr(self, key), low=0)
        check(
            self.gpus <= 1,
            f"critic.gpus={self.gpus:g} is more than one worker can use; allowed: 0 to 1, or critic.where=learner with "
            "learner.zero_stage=3 or learner.sharding=fsdp2, which shard the critic.",
        )
        if self.where == "learner":
            self._check_unused()

    def _check_unused(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            check(
                value == setting.default,
                f"critic.{setting.name}={value} has no effect with critic.where=learner; "
                "allowed: critic.where=service.",
            )
