"""Settings of who computes the reference policy's log-probs: ``reference.*``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrlhf.validation import check, check_choice, check_range


@dataclass(frozen=True)
class ReferenceConfig:
    """``where=learner``: the learner holds the frozen model and asks it in each step. ``where=service``: workers of
    their own do, for each rollout as it ends.

    ``dtype=auto``: float32 weights under ``learner.mixed_precision``, which is what the learner would compute.
    """

    where: str = "learner"
    workers: int = 1
    threads: int = 1  # CPU threads of one worker
    gpus: float = 0.0  # GPUs of one worker; 0 runs it on the CPU
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16: of the frozen weights
    token_budget: int = 16384  # tokens of one call, and padded tokens of one forward pass
    max_restarts: int = 3  # a worker that dies so often in a row is not started again

    def __post_init__(self) -> None:
        check_choice("reference.where", self.where, ("learner", "service"))
        check_choice("reference.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        for key in ("workers", "threads", "token_budget"):
            check_range(f"reference.{key}", getattr(self, key), low=1)
        for key in ("gpus", "max_restarts"):
            check_range(f"reference.{key}", getattr(self, key), low=0)
        check(
            self.gpus <= 1,
            f"reference.gpus={self.gpus:g} is more than one worker can use; allowed: 0 to 1, or reference.where="
            "learner with learner.zero_stage=3 or learner.sharding=fsdp2, which shard the reference model.",
        )
        if self.where == "learner":
            self._check_unused()

    def _check_unused(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            check(
                value == setting.default,
                f"reference.{setting.name}={value} has no effect with reference.where=learner; "
                "allowed: reference.where=service.",
            )
