"""Reads preference data in TRL's formats, and settles where the prompt of each pair stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.data import check_columns, check_rows, read_rows, row_place

if TYPE_CHECKING:
    from datasets import Dataset

KEY = "reward_model.path"
EXPLICIT, IMPLICIT = ("prompt", "chosen", "rejected"), ("chosen", "rejected")


def read_pairs(path: str, split: str) -> tuple[Dataset, bool]:
    """The pairs, and whether they are conversations; with a column ``prompt`` only where it is not in the answers too.

    Raises ConfigError, naming the row, for what is no pair. A prompt that is a text beside answers of messages, as some
    published sets have it, only repeats a turn of theirs; one that does not is refused, and so is data whose answers
    repeat a prompt of their own kind: trainers put it in front of them, and it would be read twice.
    """
    table = read_rows(path, split, KEY)
    columns = check_columns(table, (EXPLICIT, IMPLICIT), KEY, path)
    first = table[0]
    if columns == EXPLICIT and isinstance(first["prompt"], str) and isinstance(first["chosen"], list):
        columns = IMPLICIT
        conversational = check_rows(table, columns, KEY, path)
        _check_beside(table, path)
        return table.remove_columns("prompt"), conversational
    conversational = check_rows(table, columns, KEY, path)
    if columns == EXPLICIT and all(_repeats(row) for row in table):
        raise ConfigError(
            f"{KEY}={path} has its prompts in the column 'prompt' and once more at the beginning of every answer; "
            "leave them out of one."
        )
    return table, conversational


def about(row: Mapping[str, Any]) -> Any:
    """The prompt of a pair; without one, what both answers begin with: the same turns, or the same words."""
    return row.get("prompt") or _shared(row["chosen"], row["rejected"])


def _shared(one: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _check_beside(table: Dataset, path: str) -> None:
    for number, row in enumerate(table, start=1):
        shared = [turn["content"].strip() for turn in _shared(row["chosen"], row["rejected"])]
        if not isinstance(row["prompt"], str) or row["prompt"].strip() not in shared:
            raise ConfigError(
                f"{KEY}={path} {row_place(path, number)} has a prompt as text, which is no turn of its answers; "
                "give it as messages."
            )


def _repeats(row: Mapping[str, Any]) -> bool:
    return all(_begins(row[side], row["prompt"]) for side in IMPLICIT)


def _begins(answer: Any, prompt: Any) -> bool:
    if isinstance(answer, str):
        return answer.startswith(prompt)
    turns = [[(turn["role"], turn["content"]) for turn in messages] for messages in (answer, prompt)]
    return turns[0][: len(turns[1])] == turns[1]
