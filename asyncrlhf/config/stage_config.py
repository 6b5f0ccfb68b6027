"""Settings of the stages around RL: ``sft.*``, ``reward_model.*``, ``preferences.*``, ``evaluation.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.validation import check, check_choice, check_range, check_ranges

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
        check_ranges(key, self, "heldout_fraction", low=0, high=1, exclusive_high=True)
        check_ranges(key, self, "num_train_epochs", "learning_rate", low=0, exclusive_low=True)
        check(
            self.max_steps == -1 or self.max_steps >= 1,
            f"{key}.max_steps={self.max_steps} is out of range; allowed: >= 1, or -1 for {key}.num_train_epochs.",
        )
        check_choice(f"{key}.lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        check_ranges(key, self, "warmup_steps", "weight_decay", "max_grad_norm", low=0)
        check_ranges(key, self, "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps", low=1)
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


NOISES = ("none", "bradley_terry", "flip")


@dataclass(frozen=True)
class PreferencesConfig:
    """``num_prompts`` training prompts with ``num_generations`` answers each; an answer is in one pair.

    ``noise``: who labels a pair. ``none``, the answer with more ``reward.*`` is chosen; ``bradley_terry``, it is chosen
    with the probability sigmoid(margin / ``temperature``), the labeller of Gao et al. 2022 (2210.10760, section 2.2);
    ``flip``, the label is turned round with ``flip_probability``. Pairs of equal reward are dropped under each of them.
    """

    num_prompts: int = 512
    num_generations: int = 4
    noise: str = "none"
    temperature: float = 1.0  # of bradley_terry, in units of the reward
    flip_probability: float = 0.0

    def __post_init__(self) -> None:
        check_range("preferences.num_prompts", self.num_prompts, low=1)
        check_range("preferences.num_generations", self.num_generations, low=2)
        check_choice("preferences.noise", self.noise, NOISES)
        check_range("preferences.temperature", self.temperature, low=0, exclusive_low=True)
        check_range("preferences.flip_probability", self.flip_probability, low=0, high=0.5, exclusive_high=True)
        check(
            self.noise == "flip" or self.flip_probability == 0,
            f"preferences.flip_probability={self.flip_probability:g} needs preferences.noise=flip, not {self.noise}.",
        )
        check(
            self.noise == "bradley_terry" or self.temperature == 1,
            f"preferences.temperature={self.temperature:g} needs preferences.noise=bradley_terry, not {self.noise}.",
        )


ANSWERS = "answers"


@dataclass(frozen=True)
class EvaluationConfig:
    """``against``: a second model, or ``answers`` for the task's own; ``reward.*`` decides. ``reference``: the model
    that the KL and the perplexity speak of. Without top-p and top-k, so that the KL is that of what is sampled.

    ``sets``: more data than the task's held-out prompts, by name, each with what it has different from ``task.*``; of
    files and datasets the first ``task.heldout_size`` prompts of ``split``. ``pass_k``: the chance that one of k
    answers to a prompt is right, which means a reward of at least ``pass_reward``.
    """

    temperature: float = 0.0  # 0 is greedy
    num_generations: int = 1  # answers a prompt
    against: str = ""
    reference: str = ""
    sets: Any = None  # of task settings by name
    pass_k: list[int] = field(default_factory=list)
    pass_reward: float = 1.0
    samples_shown: int = 5  # on the terminal; evaluation.json has all of them

    def __post_init__(self) -> None:
        check_ranges("evaluation", self, "temperature", "samples_shown", low=0)
        check_range("evaluation.num_generations", self.num_generations, low=1)
        check(
            self.temperature > 0 or self.num_generations == 1,
            f"evaluation.num_generations={self.num_generations} greedy answers would all be the same; "
            "allowed: 1, or evaluation.temperature > 0.",
        )
        check_range("evaluation.pass_reward", self.pass_reward)
        for k in self.pass_k:
            check(
                1 <= k <= self.num_generations,
                f"evaluation.pass_k={k} needs as many answers a prompt; allowed: 1 to evaluation.num_generations="
                f"{self.num_generations}.",
            )
        named = self.sets if isinstance(self.sets, Mapping) else {}
        check(
            self.sets is None or (named and all(isinstance(entry, Mapping) for entry in named.values())),
            f"evaluation.sets={self.sets} are no data by name; allowed: null, or such as "
            "{gsm8k:{path:openai/gsm8k,subset:main,split:test}}.",
        )
