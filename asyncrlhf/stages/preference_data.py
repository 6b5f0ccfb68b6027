"""Preference data: read in TRL's formats, and converted to the token ids that a reward model scores later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers

from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.data import check_columns, check_rows, read_rows, row_place

if TYPE_CHECKING:
    from datasets import Dataset

KEY = "reward_model.path"
EXPLICIT, IMPLICIT = ("prompt", "chosen", "rejected"), ("chosen", "rejected")


def read_pairs(path: str, split: str) -> tuple[Dataset, bool]:
    """The pairs, and whether they are conversations; a column ``prompt`` remains only if the answers do not contain it.

    Raises ConfigError, naming the row, for a row that is not a pair. In some published sets a text prompt repeats
    one of the turns of its answers, which are messages; it is removed, and refused if it repeats none. Answers that
    repeat a prompt of the same format are refused: trainers put the prompt in front, so it would be read twice.
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
    """The prompt of a pair; without one, the common beginning of both answers: the same turns, or the same words."""
    return row.get("prompt") or _shared(row["chosen"], row["rejected"])


def _shared(one: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _check_beside(table: Dataset, path: str) -> None:
    for number, row in enumerate(table, start=1):
        shared = [turn["content"].strip() for turn in _shared(row["chosen"], row["rejected"])]
        if not isinstance(row["prompt"], str) or row["prompt"].strip() not in shared:
            raise ConfigError(
                f"{KEY}={path} {row_place(path, number)} has its prompt as text, but its answers as messages; "
                "give both as messages."
            )


def _repeats(row: Mapping[str, Any]) -> bool:
    return all(_begins(row[side], row["prompt"]) for side in IMPLICIT)


def _begins(answer: Any, prompt: Any) -> bool:
    if isinstance(answer, str):
        return answer.startswith(prompt)
    turns = [[(turn["role"], turn["content"]) for turn in messages] for messages in (answer, prompt)]
    return turns[0][: len(turns[1])] == turns[1]


Ids = list[int]


class PairEncoder:
    """Encodes a row's prompt and answer as the ids [P+L] that ``rewards.model_inputs.policy_ids`` makes of a rollout.

    These are the prompt as the policy sees it (the chat template with its generation prompt, or the plain text), the
    answer, and the end token last. Text that a template writes after the end token, such as ChatML's line break, is
    left out: no policy writes it, and a causal reward model's score is that of the last token.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = str(tokenizer.eos_token)
        self._end_id = int(tokenizer.eos_token_id)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Ids]:
        """``chosen_ids`` and ``rejected_ids``, the form in which TRL's ``RewardTrainer`` takes tokenised data."""
        prompt, tools = row.get("prompt"), row.get("tools")
        options = dict(row.get("chat_template_kwargs") or {})
        if tools:
            options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        return {f"{side}_ids": self.encode(prompt, row[side], **options) for side in ("chosen", "rejected")}

    def encode(self, prompt: Any, answer: Any, **options: Any) -> Ids:
        """Ids of texts or of conversations; ``prompt`` None: it is part of ``answer``. ``options``: for the chat
        template."""
        if isinstance(answer, str):
            return self._join(prompt or "", answer.removesuffix(self._end), special=True)
        before = self._render(prompt, add_generation_prompt=True, **options) if prompt else ""
        whole = self._render([*(prompt or []), *answer], **options)
        if not whole.startswith(before):  # a template that renders the prompt differently with an answer
            before = ""
        rest = whole[len(before) :]
        rest = rest.rpartition(self._end)[0] if self._end in rest else rest
        return self._join(before, rest, special=False)

    def _render(self, messages: list[Any], **options: Any) -> str:
        # As text first: the template writes the special tokens itself.
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _join(self, prompt: str, answer: str, special: bool) -> Ids:
        """Ids of ``prompt``, ``answer`` (without end token), end token. ``special``: add the tokens that begin a
        text."""
        whole = self._ids(prompt + answer, special)
        if prompt:
            alone = self._ids(prompt, special)
            if whole[: len(alone)] != alone:  # a token across the border, which a policy cannot have sampled
                whole = alone + self._ids(answer, False)
        return whole if whole and whole[-1] == self._end_id else [*whole, self._end_id]

    def _ids(self, text: str, special: bool) -> Ids:
        return list(self._tokenizer(text, add_special_tokens=special).input_ids)


def choose_padding(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Give ``tokenizer`` a padding token other than its end token, from its existing tokens.

    transformers takes a sequence's score at its last token that is not padding. If the end token is the padding token,
    as in many chat models, it would be the score of the token before it.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    known = [t for t in (tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens) if t]
    others = [token for token in [*known, *sorted(tokenizer.get_vocab())] if token != tokenizer.eos_token]
    tokenizer.pad_token = others[0]
