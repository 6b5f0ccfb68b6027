"""The user's own prompts: JSONL or Parquet files, a folder of them, or a dataset of the `datasets` library."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.tasks.answers import extract_answer, unwrap
from asyncrlhf.tasks.task import LongPromptError, PromptEncoder
from asyncrlhf.types import Prompt

if TYPE_CHECKING:
    import transformers

SUFFIXES = (".jsonl", ".parquet")
# Without a split of their own, at most one text in so many is held out.
HELDOUT_SHARE = 10
LOOKED_AT = 1000  # rows that the first check reads
# (where the row stands, for messages; the row)
Row = tuple[str, dict[str, Any]]


class PromptsTask:
    """Prompts from ``task.path``, with reference answers where the rows have ``task.answer_key``.

    Held out are the rows of ``task.heldout_split``, or else up to a tenth of the texts, chosen by their hash: the same
    ones for every seed and order of the rows. The rule scores 1 for the reference answer, as
    :func:`~asyncrlhf.tasks.answers.extract_answer` finds it, and 0 for another; without answers there is no rule, and
    the run needs ``reward.kind=python``.
    """

    def __init__(self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._config = config
        self._encode = PromptEncoder(tokenizer, config)
        self._skipped = 0
        rows = list(_read(config, config.split))
        if not rows:
            raise ConfigError(f"task.path={config.path} holds no prompts.")
        prompts = self._prompts(rows)
        if not prompts:
            raise ConfigError(
                f"task.path={config.path} holds no prompt of up to "
                f"task.max_prompt_length={config.max_prompt_length} tokens."
            )
        if config.heldout_split:
            if Path(config.path).expanduser().exists():
                raise ConfigError(
                    "task.heldout_split is for datasets by name; local files are split by the hash of the prompt."
                )
            heldout = self._prompts(_read(config, config.heldout_split))
            self._heldout = heldout[: config.heldout_size]
        else:
            self._heldout = _choose_heldout(prompts, config)
        texts = {prompt.text for prompt in self._heldout}
        self._train = [prompt for prompt in prompts if prompt.text not in texts]
        if not self._train:
            raise ConfigError(f"task.path={config.path} holds one prompt only; at least two different ones are needed.")

    @property
    def notes(self) -> list[str]:
        limit = self._config.max_prompt_length
        return [f"Left out {self._skipped} prompts of more than {limit} tokens."] if self._skipped else []

    def train_source(self, seed: int) -> PromptSource:
        return PromptSource(self._train.__getitem__, length=len(self._train), seed=seed)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)

    def reward(self, prompt: Prompt, completion: str) -> float:
        if prompt.answer is None:
            raise RewardError(
                f"The prompt {prompt.prompt_id} has no {self._config.answer_key!r}, so nothing can be compared; "
                "give answers, or a reward of your own by reward.kind=python."
            )
        return float(extract_answer(completion, prompt.answer) == unwrap(prompt.answer))

    def _prompts(self, rows: Iterable[Row]) -> list[Prompt]:
        made = []
        for row in rows:
            try:
                made.append(self._prompt(row))
            except LongPromptError:
                if not self._config.skip_long_prompts:
                    raise
                self._skipped += 1
        return made

    def _prompt(self, row: Row) -> Prompt:
        where, fields = row
        key, answer_key = self._config.prompt_key, self._config.answer_key
        text = _text(row, key)
        answer = fields.get(answer_key)
        metadata = {name: value for name, value in fields.items() if name not in (key, answer_key)}
        return self._encode(where, text, None if answer is None else str(answer), metadata)


def check_rows(config: TaskConfig) -> None:
    """Raise ConfigError for local rows that could not be used, of the first ``LOOKED_AT``, without the libraries that a
    run needs: a wrong path is answered at once. What needs a tokenizer, or the network, waits for the task itself."""
    path = Path(config.path).expanduser()
    if path.exists() or path.suffix in SUFFIXES or config.path.startswith((".", "/", "~")):
        for row in itertools.islice(_read(config, config.split), LOOKED_AT):
            _text(row, config.prompt_key)


def _text(row: Row, key: str) -> str:
    """The prompt of a row; raises ConfigError for one without."""
    where, fields = row
    text = fields.get(key)
    if not isinstance(text, str) or not text.strip():
        problem = "has no key" if key not in fields else "has no text under the key"
        raise ConfigError(f"{where} {problem} {key!r} (task.prompt_key); its keys are: {', '.join(fields) or 'none'}.")
    return text


def _choose_heldout(prompts: list[Prompt], config: TaskConfig) -> list[Prompt]:
    by_text = {prompt.text: prompt for prompt in reversed(prompts)}
    ranked = sorted(by_text, key=lambda text: hashlib.sha256(text.encode()).digest())
    size = min(config.heldout_size, max(1, len(ranked) // HELDOUT_SHARE))
    return [by_text[text] for text in ranked[:size]]


def _read(config: TaskConfig, split: str) -> Iterator[Row]:
    path = config.path
    local = Path(path).expanduser()
    if local.exists():
        files = sorted(f for f in local.iterdir() if f.suffix in SUFFIXES) if local.is_dir() else [local]
        if not files:
            raise ConfigError(f"The folder task.path={path} holds no {' or '.join(SUFFIXES)} file.")
        for file in files:
            yield from _read_file(file)
    elif path.startswith((".", "/", "~")) or local.suffix in SUFFIXES:
        raise ConfigError(f"task.path={path} does not exist.")
    else:
        yield from _read_dataset(path, config.subset, split)


def _read_file(file: Path) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        yield from _read_jsonl(file)
    elif file.suffix == ".parquet":
        try:
            rows = pq.read_table(file).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{file} is not a Parquet file: {str(error).splitlines()[0]}") from error
        for number, row in enumerate(rows, start=1):
            yield f"{file.name} row {number}", row
    else:
        raise ConfigError(f"task.path={file} is neither {' nor '.join(SUFFIXES)}.")


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.name} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where} is not valid JSON: {error.msg}.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where} is not a JSON object.")
            yield where, row


def _read_dataset(name: str, subset: str, split: str) -> Iterator[Row]:
    # The library takes a second to import, and only this kind of path needs it.
    import datasets

    try:
        dataset = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"task.path={name} is no local file, and no dataset that loads: {reason}.") from error
    for number, row in enumerate(dataset, start=1):
        yield f"{name}[{split}] row {number}", row
