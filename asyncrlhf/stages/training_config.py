"""Settings of the stages that TRL's trainers run: ``sft.*`` and ``reward_model.*``, under TRL's names."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

PRECISIONS = ("none", "bfloat16", "float16")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


@dataclass(frozen=True)
class TrainerConfig:
    """What both trainers take; one process is one device, so that a batch over all devices is ``accelerate launch``'s.

    ``path``: a JSONL or Parquet file, a folder of them, what `datasets` saved to disk, or the name of a dataset. Held
    out are the rows of ``heldout_split``, or else a share of the prompts, chosen by their hash: all rows of a prompt
    are on one side.
    """

    path: str = ""
    split: str = "train"
    heldout_split: str = ""
    heldout_fraction: float = 0.1
    num_train_epochs: float = 1.0
    max_steps: int = -1  # optimizer steps; -1 leaves it to num_train_epochs
    learning_rate: float = 2e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    per_device_train_batch_size: int = 8  # rows, or pairs, of one forward pass
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    max_length: int = 1024  # tokens of one row, at most the model's context
    mixed_precision: str = "none"  # none | bfloat16 | float16: autocast over float32 master weights
    logging_steps: int = 10

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``, for a value out of range."""
        check(
            0 <= self.heldout_fraction < 1,
            f"{key}.heldout_fraction={self.heldout_fraction} is out of range; allowed: >= 0 and < 1.",
        )
        check_range(f"{key}.num_train_epochs", self.num_train_epochs, low=0, exclusive_low=True)
        check(
            self.max_steps == -1 or self.max_steps >= 1,
            f"{key}.max_steps={self.max_steps} is out of range; allowed: >= 1, or -1 for {key}.num_train_epochs.",
        )
        check_range(f"{key}.learning_rate", self.learning_rate, low=0, exclusive_low=True)
        check_choice(f"{key}.lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            check_range(f"{key}.{name}", getattr(self, name), low=0)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps"):
            check_range(f"{key}.{name}", getattr(self, name), low=1)
        check_range(f"{key}.max_length", self.max_length, low=2)
        check_choice(f"{key}.mixed_precision", self.mixed_precision, PRECISIONS)


@dataclass(frozen=True)
class SftConfig(TrainerConfig):
    """TRL's ``SFTTrainer``. Rows: ``text``; ``prompt`` and ``completion``, whose loss is the completion's alone; or
    ``messages``. ``packing`` fills rows of ``max_length`` tokens with several texts."""

    packing: bool = False
    assistant_only_loss: bool = False  # of messages: the assistant's turns alone train

    def __post_init__(self) -> None:
        self.check("sft")


@dataclass(frozen=True)
class RewardTrainingConfig(TrainerConfig):
    """TRL's ``RewardTrainer``. Rows: ``chosen`` and ``rejected``, texts or messages, with or without ``prompt``; a
    ``margin`` column, where there is one, is what their scores should differ by at least."""

    learning_rate: float = 1e-4
    center_rewards_coefficient: float = 0.0  # pulls the mean score to zero (2312.09244, eq. 2); 0.01 is its authors'

    def __post_init__(self) -> None:
        self.check("reward_model")
        check_range("reward_model.center_rewards_coefficient", self.center_rewards_coefficient, low=0)
