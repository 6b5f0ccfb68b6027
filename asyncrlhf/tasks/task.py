"""The Task protocol, and the one place where a prompt's text becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import numpy as np

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import Prompt
from asyncrlhf.validation import check

if TYPE_CHECKING:  # seconds of imports, which a check of the data does not need
    import transformers

# If the tokenizer knows less than this share of a prompt, the model would train on noise.
MIN_KNOWN_SHARE = 0.5


class LongPromptError(ConfigError):
    """A prompt over ``task.max_prompt_length``."""


class Task(Protocol):
    """The source of prompts and the rule for good completions."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the prompts for the user, before the run starts."""
        ...

    def train_source(self, seed: int) -> PromptSource:
        """A fresh endless source; the same seed gives the same prompts in the same order."""
        ...

    def heldout(self) -> list[Prompt]:
        """The prompts of evaluation, always the same ones; no training source yields them."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The rule's score of a completion, given as text without special tokens. Raises RewardError if it has none."""
        ...


class PromptEncoder:
    """Makes a :class:`Prompt` from a text or a conversation: templates if configured, tokens, length check.

    ``Prompt.text`` stays the task's own text, for the records, or a conversation's rendering; ``token_ids``
    are the model's input, including ``task.prompt_template``, chat template and special tokens. A conversation is
    formatted with the chat template, with ``task.system_prompt`` before it unless it begins with a system message.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: TaskConfig) -> None:
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError("task.chat_template=true, but the tokenizer of model.path has no chat template.")
        self._tokenizer = tokenizer
        self._unknown = tokenizer.unk_token_id
        self._config = config

    def __call__(
        self,
        prompt_id: str,
        given: str | Sequence[Mapping[str, Any]],
        answer: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Raises ConfigError, naming ``prompt_id``, for a prompt that is empty, unreadable to the model or too long
        (LongPromptError)."""
        messages = None if isinstance(given, str) else given
        text = given if isinstance(given, str) else written_out(given)
        try:
            ids = self._token_ids(text) if messages is None else self._conversation_ids(prompt_id, messages)
        except jinja2.TemplateError as error:  # a conversation that the template refuses, such as two turns of one role
            raise ConfigError(f"The prompt {prompt_id} is refused by the chat template: {error}.") from error
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
            messages=messages,
        )

    def _token_ids(self, text: str) -> list[int]:
        if not self._config.chat_template:
            text = self._config.prompt_template.replace("{prompt}", text)
            for key in ("system_prompt", "chat_template_kwargs"):
                check(not getattr(self._config, key), f"task.{key} needs task.chat_template=true.")
            return list(self._tokenizer(text).input_ids)
        return self._rendered_ids(self.messages(text))

    def messages(self, given: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation that the chat template formats: of a text one message of the user, in
        ``task.prompt_template``; with ``task.system_prompt`` before it, unless it has a system message."""
        asked: Sequence[Mapping[str, Any]]
        if isinstance(given, str):
            asked = [{"role": "user", "content": self._config.prompt_template.replace("{prompt}", given)}]
        else:
            asked = given
        if self._config.system_prompt and asked[0]["role"] != "system":
            return [{"role": "system", "content": self._config.system_prompt}, *asked]
        return [*asked]

    def _conversation_ids(self, prompt_id: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"The prompt {prompt_id} is a conversation, but the tokenizer of model.path has no chat template."
            )
        if self._config.prompt_template != "{prompt}":
            raise ConfigError(f"task.prompt_template is for texts, and the prompt {prompt_id} is a conversation.")
        return self._rendered_ids(self.messages(messages))

    def _rendered_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a chat; an assistant's last message is continued by the model, as in TRL."""
        begun = messages[-1]["role"] == "assistant"
        rendered: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=not begun,
            continue_final_message=begun,
            tokenize=False,
            **(self._config.chat_template_kwargs or {}),
        )
        return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)


def written_out(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one text: the content of a single message, several with their roles before them."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
