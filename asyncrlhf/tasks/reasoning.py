"""Prompts and verifiable rewards from reasoning-gym's procedural datasets."""

from __future__ import annotations

from typing import Any

import reasoning_gym
import transformers
from reasoning_gym.factory import DATASETS

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError
from asyncrlhf.tasks.answers import extract_answer
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Prompt
from asyncrlhf.validation import did_you_mean

HELDOUT_SEED = 0
# reasoning-gym seeds entry i with seed + i: this stride keeps the streams of two run seeds apart.
SEED_STRIDE = 1_000_000
MAX_TRIES = 1000
TRAIN_SIZE = 20_000  # prompts of an epoch: more than most runs draw, and entries are made as they are drawn


class ReasoningTask:
    """``task.datasets``, taken in turn. A completion's answer is found by :func:`extract_answer` and scored in [0, 1]
    by the dataset's own ``score_answer``, which may give partial credit.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._config = config
        self._encode = PromptEncoder(tokenizer, config)
        self._scorers = {name: _create(config, name, HELDOUT_SEED) for name in config.datasets}
        self._heldout = self._make_heldout()
        self._heldout_texts = {prompt.text for prompt in self._heldout}
        # A dataset with few questions may be completely held out; report this before the run.
        for name in config.datasets:
            self._train_prompt(name, self._scorers, 0, HELDOUT_SEED)

    def train_source(self, seed: int) -> PromptSource:
        """``TRAIN_SIZE`` prompts of this seed, shuffled anew each epoch."""
        base = SEED_STRIDE * (seed + 1)
        datasets = {name: _create(self._config, name, base) for name in self._config.datasets}

        def prompt_at(index: int) -> Prompt:
            number, which = divmod(index, len(self._config.datasets))
            return self._train_prompt(self._config.datasets[which], datasets, number, base)

        return PromptSource(prompt_at, length=TRAIN_SIZE, seed=seed)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)

    def reward(self, prompt: Prompt, completion: str) -> float:
        reference = prompt.answer or ""
        entry = {"question": prompt.text, "answer": reference, "metadata": prompt.metadata["entry"]}
        scorer = self._scorers[prompt.metadata["dataset"]]
        return float(scorer.score_answer(extract_answer(completion, reference), entry))

    def _train_prompt(self, name: str, datasets: dict[str, Any], number: int, base: int) -> Prompt:
        """Entry ``number``, or the next that is neither a held-out question nor too long."""
        for attempt in range(MAX_TRIES):
            at = (number + attempt) % TRAIN_SIZE
            entry = datasets[name][at]
            if entry["question"] in self._heldout_texts:
                continue
            try:
                return self._prompt(name, base + at, entry)
            except ConfigError:
                continue
        raise ConfigError(
            f"task.datasets: {name} gave no training prompt in {MAX_TRIES} tries that is not held out and has at most "
            f"task.max_prompt_length={self._config.max_prompt_length} tokens; choose a smaller task.heldout_size."
        )

    def _make_heldout(self) -> list[Prompt]:
        drawn: dict[str, Prompt] = {}
        names = self._config.datasets
        for index in range(4 * self._config.heldout_size):
            name = names[index % len(names)]
            number = index // len(names)
            entry = self._scorers[name][number]
            if entry["question"] not in drawn:
                drawn[entry["question"]] = self._prompt(name, number, entry)
            if len(drawn) == self._config.heldout_size:
                break
        return list(drawn.values())

    def _prompt(self, name: str, number: int, entry: dict[str, Any]) -> Prompt:
        return self._encode(
            f"{name}:{number}", entry["question"], entry["answer"], {"dataset": name, "entry": entry["metadata"]}
        )


def _create(config: TaskConfig, name: str, seed: int) -> Any:
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise ConfigError(
            f"task.datasets: reasoning-gym has no dataset {name!r}{hint}; it knows {len(DATASETS)} others."
        )
    options = config.dataset_options.get(name, {})
    try:
        return reasoning_gym.create_dataset(name, size=TRAIN_SIZE, seed=seed, **options)
    # A dataset raises an assertion or a TypeError of its config class for a wrong option.
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.dataset_options.{name}={options} is refused by reasoning-gym: {error}.") from error
