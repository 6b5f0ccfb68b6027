"""Token ids of preference data: the very ids that a reward model is given of a rollout later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

Ids = list[int]


class PairEncoder:
    """Turns a row's prompt and answer into the ids [P+L] that ``rewards.model_inputs.policy_ids`` makes of a rollout.

    That is the prompt as the policy sees it (the chat template with its generation prompt, or the plain text), the
    answer, and the end token as the last one. What a template writes behind the end token, such as the line break of
    ChatML, is left out: no policy writes it, and a causal reward model's score is that of the last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = str(tokenizer.eos_token)
        self._end_id = int(tokenizer.eos_token_id)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Ids]:
        """``chosen_ids`` and ``rejected_ids``, as TRL's ``RewardTrainer`` takes data that is tokenised already."""
        prompt, tools = row.get("prompt"), row.get("tools")
        options = dict(row.get("chat_template_kwargs") or {})
        if tools:
            options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        return {f"{side}_ids": self.encode(prompt, row[side], **options) for side in ("chosen", "rejected")}

    def encode(self, prompt: Any, answer: Any, **options: Any) -> Ids:
        """Ids of texts or of conversations; ``prompt`` None: it is the beginning of ``answer``. ``options`` go to the
        chat template."""
        if isinstance(answer, str):
            return self._join(prompt or "", answer.removesuffix(self._end), special=True)
        before = self._render(prompt, add_generation_prompt=True, **options) if prompt else ""
        whole = self._render([*(prompt or []), *answer], **options)
        if not whole.startswith(before):  # a template that writes the prompt in another way once there is an answer
            before = ""
        rest = whole[len(before) :]
        rest = rest.rpartition(self._end)[0] if self._end in rest else rest
        return self._join(before, rest, special=False)

    def _render(self, messages: list[Any], **options: Any) -> str:
        # As text first: the template writes the special tokens itself.
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _join(self, prompt: str, answer: str, special: bool) -> Ids:
        """``answer`` has no end token yet. ``special``: the tokenizer adds the special tokens that begin a text."""
        whole = self._ids(prompt + answer, special)
        if prompt:
            alone = self._ids(prompt, special)
            if whole[: len(alone)] != alone:  # a token across the border, which no policy could have sampled
                whole = alone + self._ids(answer, False)
        return whole if whole and whole[-1] == self._end_id else [*whole, self._end_id]

    def _ids(self, text: str, special: bool) -> Ids:
        return list(self._tokenizer(text, add_special_tokens=special).input_ids)


def choose_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give ``tokenizer`` a padding token other than its end token, out of those that it has.

    transformers pools a sequence's score at its last token that is not padding. Were the end token padding, as it is in
    many chat models, the score would be that of the token before it.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    known = [t for t in (tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens) if t]
    others = [token for token in [*known, *sorted(tokenizer.get_vocab())] if token != tokenizer.eos_token]
    tokenizer.pad_token = others[0]
