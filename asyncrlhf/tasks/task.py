"""The Task protocol, and the one place where a prompt's text becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import Prompt

if TYPE_CHECKING:  # seconds of imports, which a check of the data need not wait for
    import transformers

# A prompt of which the tokenizer knows less than this share would train a model on noise.
MIN_KNOWN_SHARE = 0.5


class LongPromptError(ConfigError):
    """A prompt over ``task.max_prompt_length``."""


class Task(Protocol):
    """Where prompts come from and what a good completion is."""

    @property
    def notes(self) -> Sequence[str]:
        """What a user should hear of the prompts before the run starts, a sentence each."""
        ...

    def train_source(self, seed: int) -> PromptSource:
        """A fresh endless source; the same seed gives the same prompts in the same order."""
        ...

    def heldout(self) -> list[Prompt]:
        """The prompts of evaluation, always the same ones; no training source ever gives one of them."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The rule's score of a completion, given as text without special tokens. Raises RewardError if it has none."""
        ...


class PromptEncoder:
    """Makes a :class:`Prompt` of a text: templates if asked for, tokens, length check.

    ``Prompt.text`` stays the task's own text, as reward functions and records want it; ``token_ids`` hold what the
    model sees, ``task.prompt_template``, chat template and special tokens included.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: TaskConfig) -> None:
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError("task.chat_template=true, but the tokenizer of model.path has no chat template.")
        if config.system_prompt and not config.chat_template:
            raise ConfigError("task.system_prompt needs task.chat_template=true.")
        self._tokenizer = tokenizer
        self._unknown = tokenizer.unk_token_id
        self._config = config

    def __call__(
        self,
        prompt_id: str,
        text: str,
        answer: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Raises ConfigError, naming ``prompt_id``, for a prompt that is empty, unreadable to the model or too long
        (LongPromptError)."""
        ids = self._token_ids(text)
        limit = self._config.max_prompt_length
        if len(ids) == 0:
            raise ConfigError(f"The prompt {prompt_id} is empty.")
        if len(ids) > limit:
            raise LongPromptError(
                f"The prompt {prompt_id} has {len(ids)} tokens; allowed: at most task.max_prompt_length={limit}."
            )
        known = sum(token != self._unknown for token in ids)
        if known < MIN_KNOWN_SHARE * len(ids):
            raise ConfigError(
                f"The tokenizer of model.path knows only {known} of the {len(ids)} tokens of the prompt {prompt_id}; "
                "choose a model that can read this task."
            )
        return Prompt(
            prompt_id=prompt_id,
            text=text,
            token_ids=np.asarray(ids, dtype=np.int64),
            answer=answer,
            metadata=dict(metadata or {}),
        )

    def _token_ids(self, text: str) -> list[int]:
        text = self._config.prompt_template.replace("{prompt}", text)
        if not self._config.chat_template:
            return list(self._tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
        if self._config.system_prompt:
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)
