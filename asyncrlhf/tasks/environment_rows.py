"""Prompts without a text of their own: an episode's environment asks when it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.rows import read_rows
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Prompt

if TYPE_CHECKING:
    import transformers

HELDOUT_SHARE = 10  # without a separate split, one of so many rows is held out
SEED_STRIDE = 1_000_000  # keeps the seeds of two runs apart


class EnvironmentRows:
    """The rows of ``task.path``, without a column for the prompt; or without a path a number each, in the column
    ``seed``, from which an environment may make its own data: the rollouts of a group have the same one.

    With a chat template the prompt is an empty message of the user, to which the environment's ``reset`` adds.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._chat = bool(tokenizer.chat_template)
        self._encode = PromptEncoder(tokenizer, config)
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id, 0]
        self._placeholder = next(int(token) for token in ends if token is not None)
        self._rows: list[Prompt] = []
        if not config.path:
            self._heldout = [self._prompt("seed", {"seed": number}) for number in range(config.heldout_size)]
            return
        rows = [self._prompt(where, columns) for where, columns in read_rows(config, config.split)]
        if len(rows) < 2:
            raise ConfigError(f"task.path={config.path} holds {len(rows)} rows; at least two are needed.")
        held = range(0, len(rows), HELDOUT_SHARE)[: config.heldout_size]
        self._heldout = [rows[place] for place in held]
        self._rows = [prompt for place, prompt in enumerate(rows) if place not in held]

    def train_source(self, seed: int) -> PromptSource:
        if self._rows:
            return PromptSource(self._rows.__getitem__, length=len(self._rows), seed=seed)
        first = SEED_STRIDE * (seed + 1)
        return PromptSource(lambda index: self._prompt("seed", {"seed": first + index}), length=None, seed=seed)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)

    def reward(self, prompt: Prompt, completion: str) -> float:
        raise RewardError(
            "The prompts of task.kind=environment have no rule; allowed: reward.kind=environment, or a reward of your "
            "own by reward.kind=python."
        )

    def _prompt(self, where: str, columns: Mapping[str, Any]) -> Prompt:
        kept = {name: value for name, value in columns.items() if _is_json(value)}
        name = f"{where}:{columns['seed']}" if where == "seed" else where
        if self._chat:
            return self._encode(name, [{"role": "user", "content": ""}], metadata=kept)
        return Prompt(name, "", np.array([self._placeholder], dtype=np.int64), metadata=kept)


def _is_json(value: Any) -> bool:
    """Whether a checkpoint, which is JSON, can hold the value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
