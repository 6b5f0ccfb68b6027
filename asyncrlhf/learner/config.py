"""Settings of the learner: ``learner.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check_choice, check_range

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearnerConfig:
    """``token_budget``: packed tokens of one forward pass; ``threads``: CPU threads of one rank."""

    backend: str = "torch"
    ranks: int = 1
    threads: int = 1
    gpus: float = 0.0  # GPUs of one rank; 0 runs it on the CPU
    learning_rate: float = 5e-5
    critic_learning_rate: float = 0.0  # 0: the policy's
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    token_budget: int = 4096
    mixed_precision: str = "none"  # none | bfloat16 | float16: autocast over float32 master weights
    gradient_checkpointing: bool = False
    compile: bool = False
    max_skipped_steps: int = 10  # non-finite steps in a row before the run fails
    virtual_step_seconds: float = 0.1  # runtime=local: what one train step costs on the virtual clock

    def __post_init__(self) -> None:
        check_choice("learner.backend", self.backend, ("torch",))
        check_choice("learner.lr_schedule", self.lr_schedule, SCHEDULES)
        check_choice("learner.mixed_precision", self.mixed_precision, ("none", "bfloat16", "float16"))
        check_range("learner.learning_rate", self.learning_rate, low=0)
        for key in ("ranks", "threads", "token_budget", "max_skipped_steps"):
            check_range(f"learner.{key}", getattr(self, key), low=1)
        for key in (
            "gpus",
            "critic_learning_rate",
            "weight_decay",
            "warmup_steps",
            "virtual_step_seconds",
            "max_grad_norm",
        ):
            check_range(f"learner.{key}", getattr(self, key), low=0)
        for key in ("adam_beta1", "adam_beta2"):
            check_range(f"learner.{key}", getattr(self, key), low=0, high=1, exclusive_high=True)
