"""The user's own prompts, texts or conversations, from files, datasets or objects; whole, streamed or mixed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.rows import (
    Row,
    has_splits,
    is_conversation,
    is_saved,
    is_text,
    looks_local,
    read_rows,
    refuse_images,
)
from asyncrlhf.data.sources import Mixture, PromptSource, PromptStream, shuffled
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.tasks.answers import extract_answer, unwrap
from asyncrlhf.tasks.task import LongPromptError, PromptEncoder
from asyncrlhf.types import Prompt

if TYPE_CHECKING:
    import transformers

# Without a separate split, at most one of this many texts is held out.
HELDOUT_SHARE = 10
LOOKED_AT = 1000  # rows that the first check reads
SHUFFLE_BUFFER = 1000  # rows of a stream that are shuffled at a time; a dataset in order of its topics needs a file


class PromptsTask:
    """Prompts from ``task.path``, with reference answers if the rows have ``task.answer_key``.

    Reward functions get a row's other columns by name. The rows of ``task.heldout_split`` are held out, or else up to
    a tenth of the texts, chosen by hash: the same ones for every seed and order of the rows. With ``task.streaming``
    no row is kept, and the first ones are held out. The rule scores 1 for the reference answer, as
    :func:`~asyncrlhf.tasks.answers.extract_answer` finds it, and 0 otherwise; without answers there is no rule, and
    the run needs ``reward.kind=python``.
    """

    def __init__(
        self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase, *, trains: bool = True
    ) -> None:
        """``trains=False``: the task has only the first different prompts of ``task.split``, all of them held out."""
        self._config = config
        self._encode = PromptEncoder(tokenizer, config)
        self._skipped = 0
        self._left_out: dict[str, str] = {}  # columns that a checkpoint cannot store, with their type
        self._columns: dict[str, None] = {}  # of all rows so far, in their order
        self._train: list[Prompt] = []
        self._conversational: bool | None = None
        if not trains:
            self._heldout = self._aligned(self._first_prompts(config.split))
            return
        if config.heldout_split and not has_splits(config.path):
            raise ConfigError(
                "task.heldout_split is for datasets by name; local files are split by the hash of the prompt."
            )
        if config.streaming:
            self._heldout = self._first_prompts(config.heldout_split or config.split)
        else:
            self._train, self._heldout = self._split_whole()
        self.withhold({prompt.text for prompt in self._heldout})

    def _split_whole(self) -> tuple[list[Prompt], list[Prompt]]:
        """All prompts, and the held-out ones."""
        config = self._config
        rows = list(read_rows(config, config.split))
        if not rows:
            raise ConfigError(f"task.path={config.path} holds no prompts.")
        prompts = list(self._prompts(rows))
        if not prompts:
            raise ConfigError(
                f"task.path={config.path} holds no prompt of up to "
                f"task.max_prompt_length={config.max_prompt_length} tokens."
            )
        if not config.heldout_split:
            return self._aligned(prompts), self._aligned(_choose_heldout(prompts, config))
        heldout = list(self._prompts(read_rows(config, config.heldout_split)))[: config.heldout_size]
        return self._aligned(prompts), self._aligned(heldout)

    def _first_prompts(self, split: str) -> list[Prompt]:
        """The first different prompts of a split, which a stream holds out."""
        found: dict[str, Prompt] = {}
        for prompt in self._prompts(read_rows(self._config, split)):
            found.setdefault(prompt.text, prompt)
            if len(found) == self._config.heldout_size:
                break
        if not found:
            raise ConfigError(f"task.path={self._config.path} holds no prompts.")
        return list(found.values())

    @property
    def notes(self) -> list[str]:
        limit = self._config.max_prompt_length
        notes = [f"Left out {self._skipped} prompts of more than {limit} tokens."] if self._skipped else []
        return notes + [
            f"Left out the column {name!r}: its values are {kind}, which no checkpoint could hold."
            for name, kind in self._left_out.items()
        ]

    @property
    def conversational(self) -> bool:
        """Whether the prompts are lists of messages."""
        return bool(self._conversational)

    def withhold(self, texts: Collection[str]) -> None:
        """Exclude prompts with these texts from training. Raises ConfigError if none is left."""
        self._withheld = {*texts}
        self._train = [prompt for prompt in self._train if prompt.text not in self._withheld]
        empty = next(self._pass(0, 0), None) is None if self._config.streaming else not self._train
        if empty:
            raise ConfigError(
                f"task.path={self._config.path} holds one prompt only; at least two different ones are needed."
            )

    def train_source(self, seed: int) -> PromptSource:
        if self._config.streaming:
            return PromptSource(PromptStream(partial(self._pass, seed)), length=None, seed=seed)
        return PromptSource(self._train.__getitem__, length=len(self._train), seed=seed)

    def _pass(self, seed: int, epoch: int) -> Iterator[Prompt]:
        """One pass over a stream."""
        rows = read_rows(self._config, self._config.split)
        mixed = shuffled(rows, SHUFFLE_BUFFER, np.random.default_rng([seed, epoch]))
        return (prompt for prompt in self._prompts(mixed, count=False) if prompt.text not in self._withheld)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return answer_reward(prompt, completion, self._config.answer_key)

    def _prompts(self, rows: Iterable[Row], count: bool = True) -> Iterator[Prompt]:
        for row in rows:
            try:
                yield self._prompt(row)
            except LongPromptError:
                if not self._config.skip_long_prompts:
                    raise
                self._skipped += count

    def _prompt(self, row: Row) -> Prompt:
        where, fields = row
        key = self._config.prompt_key
        given = _given(row, key)
        if self._conversational is None:
            self._conversational = isinstance(given, list)
        if self._conversational != isinstance(given, list):
            raise ConfigError(
                f"{where} and the rows before it are texts and conversations; a dataset must have one kind."
            )
        answer = fields.get(self._config.answer_key)
        columns = {name: value for name, value in fields.items() if name != key and self._can_be_kept(name, value)}
        self._columns.update(dict.fromkeys(columns))
        return self._encode(where, given, None if answer is None else str(answer), columns)

    def _can_be_kept(self, name: str, value: Any) -> bool:
        """Whether a checkpoint, which is JSON, can hold the value; a column with other values is left out."""
        if name not in self._left_out and not isinstance(value, str | int | float | None):
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                self._left_out[name] = f"of the kind {type(value).__name__}"
        return name not in self._left_out

    def _aligned(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Every prompt with the columns of all rows, so that each call of a reward function has all of them."""
        names = [name for name in self._columns if name not in self._left_out]
        whole = set(names)
        return [
            p if p.metadata.keys() == whole else replace(p, metadata={name: p.metadata.get(name) for name in names})
            for p in prompts
        ]


class MixedPrompts:
    """The sources of ``task.mixture``: a training prompt comes from each with the probability of its share, held-out
    ones in the same proportions; no source trains on prompts that another holds out."""

    def __init__(self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._config = config
        self._parts: dict[str, PromptsTask] = {}
        self._shares: list[float] = []
        for name, (part, share) in config.parts.items():
            size = max(1, round(share * config.heldout_size))
            try:
                self._parts[name] = PromptsTask(replace(part, heldout_size=size), tokenizer)
            except ConfigError as error:
                raise ConfigError(f"In task.mixture.{name}: {error}") from error
            self._shares.append(share)
        kinds = {name: "conversations" if part.conversational else "texts" for name, part in self._parts.items()}
        if len(set(kinds.values())) > 1:
            said = ", ".join(f"{kind} in {name}" for name, kind in kinds.items())
            raise ConfigError(f"task.mixture has {said}; reward functions take only one kind.")
        self._heldout = list({p.text: p for part in self._parts.values() for p in part.heldout()}.values())
        for name, source in self._parts.items():
            try:
                source.withhold({prompt.text for prompt in self._heldout})
            except ConfigError as error:
                raise ConfigError(f"In task.mixture.{name}: {error}") from error

    @property
    def notes(self) -> list[str]:
        return [f"{name}: {note}" for name, part in self._parts.items() for note in part.notes]

    def train_source(self, seed: int) -> PromptSource:
        sources = [part.train_source(seed) for part in self._parts.values()]
        return PromptSource(Mixture(sources, self._shares, seed), length=None, seed=seed)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return answer_reward(prompt, completion, self._config.answer_key)


def build_prompts(config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> PromptsTask | MixedPrompts:
    return PromptsTask(config, tokenizer) if config.mixture is None else MixedPrompts(config, tokenizer)


def answer_reward(prompt: Prompt, completion: str, key: str) -> float:
    """1 for the prompt's reference answer, 0 for another; RewardError if it has none."""
    if prompt.answer is None:
        raise RewardError(
            f"The prompt {prompt.prompt_id} has no {key!r}, so nothing can be compared; "
            "give answers, or a reward of your own by reward.kind=python."
        )
    return float(extract_answer(completion, prompt.answer) == unwrap(prompt.answer))


def check_rows(config: TaskConfig) -> None:
    """Raise ConfigError for local rows that could not be used, of the first ``LOOKED_AT`` of each source, without the
    libraries of a run, so that a wrong path is reported at once. Checks that need a tokenizer, another library or the
    network happen in the task itself."""
    for part, _ in config.parts.values() if config.mixture is not None else [(config, 1.0)]:
        path = Path(part.path).expanduser()
        if (path.exists() or looks_local(part.path)) and not is_saved(path):
            for row in itertools.islice(read_rows(part, part.split), LOOKED_AT):
                _given(row, part.prompt_key)


def _given(row: Row, key: str) -> Any:
    """The prompt of a row, a text or a list of messages; raises ConfigError for a row without one."""
    where, fields = row
    given = fields.get(key)
    refuse_images(where, fields, given)
    if not is_text(given) and not is_conversation(given):
        problem = "has no key" if key not in fields else "has no text under the key"
        if isinstance(given, list):
            problem = "has no list of messages, each with a role and a text as content, under the key"
        raise ConfigError(f"{where} {problem} {key!r} (task.prompt_key); its keys are: {', '.join(fields) or 'none'}.")
    return given


def _choose_heldout(prompts: list[Prompt], config: TaskConfig) -> list[Prompt]:
    by_text = {prompt.text: prompt for prompt in reversed(prompts)}
    ranked = sorted(by_text, key=lambda text: hashlib.sha256(text.encode()).digest())
    size = min(config.heldout_size, max(1, len(ranked) // HELDOUT_SHARE))
    return [by_text[text] for text in ranked[:size]]
