"""Settings of the stages around RL: ``sft.*``, ``reward_model.*``, ``preferences.*``, ``evaluation.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.validation import check, check_keywords, check_settings, setting


@dataclass(frozen=True)
class TrainerConfig:
    """The common settings of both trainers. One process uses one device; ``accelerate launch`` spreads a batch over
    several. All rows of a prompt are either held out or trained on."""

    path: str = setting(
        "", "Rows: a JSONL or Parquet file, a folder of them, what `datasets` saved to disk, or a dataset's name."
    )
    split: str = setting("train", "The dataset's split for training.")
    heldout_split: str = setting("", "The dataset's split that is held out; empty: a share of the prompts is held out.")
    heldout_fraction: float = setting(
        0.1, "Share of the prompts that is held out, chosen by hash.", low=0, high=1, exclusive_high=True
    )
    num_train_epochs: float = setting(
        1.0, "Passes over the rows; may be a fraction.", low=0, high=10**4, exclusive_low=True
    )
    max_steps: int = setting(-1, "Optimizer steps; -1: num_train_epochs decides.")
    learning_rate: float = setting(2e-5, "AdamW's learning rate, after warm-up.", low=0, exclusive_low=True)
    per_device_train_batch_size: int = setting(8, "Rows, or pairs, per forward pass and process.", low=1, high=10**5)
    max_length: int = setting(1024, "Longest row, in tokens, at most the model's context.", low=2)
    trainer_kwargs: Any = setting(
        None, "More keywords of TRL's arguments, by name, such as {lr_scheduler_type: cosine, packing: true}."
    )

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``, for a value out of range."""
        check_settings(key, self)
        check_keywords(f"{key}.trainer_kwargs", self.trainer_kwargs)
        check(
            self.max_steps == -1 or self.max_steps >= 1,
            f"{key}.max_steps={self.max_steps} is out of range; allowed: >= 1, or -1 for {key}.num_train_epochs.",
        )


@dataclass(frozen=True)
class SftConfig(TrainerConfig):
    """TRL's ``SFTTrainer``. Rows: ``text``; ``prompt`` and ``completion``, which alone trains; or ``messages``."""

    def __post_init__(self) -> None:
        self.check("sft")


@dataclass(frozen=True)
class RewardTrainingConfig(TrainerConfig):
    """TRL's ``RewardTrainer``. Rows: ``chosen`` and ``rejected``, texts or messages, with or without ``prompt``; an
    optional ``margin`` column gives the least difference of their scores."""

    learning_rate: float = setting(1e-4, "AdamW's learning rate, after warm-up.", low=0, exclusive_low=True)

    def __post_init__(self) -> None:
        self.check("reward_model")


NOISES = ("none", "bradley_terry", "flip")


@dataclass(frozen=True)
class PreferencesConfig:
    """Pairs of the model's own answers; an answer is in at most one pair, and pairs of equal reward are dropped."""

    num_prompts: int | None = setting(
        None, "Number of training prompts to answer; null: 512, or all of them if there are fewer.", low=1, high=10**8
    )
    num_generations: int = setting(4, "Answers a prompt.", low=2, high=10**5)
    noise: str = setting(
        "none",
        "How pairs are labelled: by the reward, by the reward with probability sigmoid(margin / temperature) as in "
        "Gao et al. 2022 (2210.10760, section 2.2), or by the reward with a share flip_probability inverted.",
        choices=NOISES,
    )
    temperature: float = setting(
        1.0, "noise=bradley_terry: its temperature, in units of the reward.", low=0, exclusive_low=True
    )
    flip_probability: float = setting(
        0.0, "noise=flip: share of the labels that are inverted.", low=0, high=0.5, exclusive_high=True
    )

    def __post_init__(self) -> None:
        check_settings("preferences", self)
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
    """How answers to the held-out prompts are sampled and measured, in `evaluate` and in a run's own evaluations:
    without top-p and top-k, which would change the KL."""

    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.", low=0)
    num_generations: int = setting(1, "Answers a prompt.", low=1, high=10**5)
    against: str = setting(
        "", "`evaluate`: opponent of the win rate by reward: a second model, or `answers` for those of the task."
    )
    reference: str = setting("", "`evaluate`: the reference model of KL and perplexity; empty: neither is measured.")
    sets: Any = setting(
        None,
        "Further held-out data by name, each with its differences from task.*; files and datasets give the first "
        "task.heldout_size prompts of split.",
    )
    pass_k: list[int] = setting([], "Numbers k for pass@k, the chance that one of k answers to a prompt is right.")
    pass_reward: float = setting(
        1.0, "The least reward of an answer that counts as right, for pass_k and task.curriculum."
    )

    def __post_init__(self) -> None:
        check_settings("evaluation", self)
        check(
            self.temperature > 0 or self.num_generations == 1,
            f"evaluation.num_generations={self.num_generations} greedy answers would all be the same; "
            "allowed: 1, or evaluation.temperature > 0.",
        )
        for k in self.pass_k:
            check(
                1 <= k <= self.num_generations,
                f"evaluation.pass_k={k} needs as many answers per prompt; allowed: 1 to "
                f"evaluation.num_generations={self.num_generations}.",
            )
        for name in self.sets if isinstance(self.sets, Mapping) else ():
            check("/" not in str(name), f"evaluation.sets.{name} has a slash in its name, which metrics cannot hold.")
        named = self.sets if isinstance(self.sets, Mapping) else {}
        check(
            self.sets is None or (named and all(isinstance(entry, Mapping) for entry in named.values())),
            f"evaluation.sets={self.sets} does not map names to data; allowed: null, or such as "
            "{gsm8k:{path:openai/gsm8k,subset:main,split:test}}.",
        )
