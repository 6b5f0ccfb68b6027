"""What the settings of the reference's workers and of the critic's have alike."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrlhf.validation import check, check_choice, check_range


@dataclass(frozen=True)
class WorkersConfig:
    """``where``: ``learner`` or ``service``, which alone has workers."""

    where: str = "learner"
    workers: int = 1
    threads: int = 1  # CPU threads of one worker
    gpus: float = 0.0  # GPUs of one worker; 0 runs it on the CPU
    token_budget: int = 16384  # tokens of one call, and padded tokens of one forward pass
    max_restarts: int = 3  # a worker that dies so often in a row is not started again

    def check(self, key: str, model: str) -> None:
        """Raise ConfigError, naming settings under ``key``, for a value out of range or without effect. ``model``: what
        a worker holds, in sentences."""
        check_choice(f"{key}.where", self.where, ("learner", "service"))
        for name in ("workers", "threads", "token_budget"):
            check_range(f"{key}.{name}", getattr(self, name), low=1)
        for name in ("gpus", "max_restarts"):
            check_range(f"{key}.{name}", getattr(self, name), low=0)
        check(
            self.gpus <= 1,
            f"{key}.gpus={self.gpus:g} is more than one worker can use; allowed: 0 to 1, or {key}.where=learner with "
            f"learner.zero_stage=3 or learner.sharding=fsdp2, which shard the {model}.",
        )
        for setting in fields(self) if self.where == "learner" else ():
            value = getattr(self, setting.name)
            check(
                value == setting.default,
                f"{key}.{setting.name}={value} has no effect with {key}.where=learner; allowed: {key}.where=service.",
            )
