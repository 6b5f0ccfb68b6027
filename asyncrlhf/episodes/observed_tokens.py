"""Tokenises text of which some stretches were observed: special tokens that these spell out remain plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.types import IntArray

if TYPE_CHECKING:
    import tokenizers
    import transformers

_MARK = "\ue0f3"  # stands before the name of each control token in the copy that reads the bare names as text


class ObservedTextError(AsyncRLHFError):
    """An observed text cannot become part of an episode; one sentence that says why."""


class ObservedTokens:
    """The tokens of texts that an episode observes.

    Control tokens are the tokenizer's special tokens, and those of its other added tokens that ``written``, the text
    of the chat template, names (such as ``<tool_call>``). Other added tokens, such as runs of spaces, are text.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, written: str = "", refuse: bool = False
    ) -> None:
        added = tokenizer.added_tokens_decoder
        self._tokenizer = tokenizer
        self._refuse = refuse
        self._control = {
            token.content: number
            for number, token in added.items()
            if token.special or (token.content.strip() and token.content in written)
        }
        # What stands for the characters that a small vocabulary lacks is no control token, unless it is also one.
        unknown = {tokenizer.unk_token} - {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
        self._numbers = frozenset(number for name, number in self._control.items() if name not in unknown)
        self._names = _any_of(self._control)
        self._special = _any_of(token.content for token in added.values() if token.special)
        # Some tokenizers mark the beginning of a text, mostly by a space. A row goes on, and has no mark: its text is
        # read after an anchor, the first one with which the tokens say what the text says.
        anchors = ["", *(t.content for t in added.values() if t.content in self._control and not t.rstrip)][:2]
        self._anchor = next((anchor for anchor in [*anchors, "\n"] if self._goes_on(anchor)), "")

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text whose control tokens are meant."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def control(self, tokens: Sequence[int]) -> list[int]:
        """The control tokens among ``tokens``, in their order."""
        return [token for token in tokens if token in self._numbers]

    def control_names(self, text: str) -> list[str]:
        """The control tokens that a text spells out, in their order."""
        return self._names.findall(text)

    def whole_names(self, text: str, place: int) -> int:
        """``place``, or the beginning of the control token of ``text`` that it would cut."""
        return next((m.start() for m in self._names.finditer(text) if m.start() < place < m.end()), place)

    def plain(self, text: str) -> list[int]:
        """As :meth:`following`, of an observed text without any other text around it."""
        return self.following("".join, [text], [])

    def following(
        self, render: Callable[[Sequence[str]], str], observed: Sequence[str], meant: Sequence[int]
    ) -> list[int]:
        """The tokens of ``render(observed)``, a text that continues a row. Its control tokens are ``meant``, those that
        it has with harmless texts: the observed ones add none.

        They are read together with the text around them, as the model saw it in its training. Only if control tokens
        differ from ``meant`` are the observed ones hidden from the search for them. Raises ObservedTextError if that
        is not allowed (``refuse``) or impossible.
        """
        return self._read(render, list(meant), observed, (), self._continued)

    def whole(
        self, render: Callable[[Sequence[str]], str], observed: Sequence[str], spoken: Sequence[str]
    ) -> list[int]:
        """The tokens of ``render([*observed, *spoken])``, a text that begins a row. The ``spoken`` texts, which the
        model sampled or an agent says that it did, add no special tokens; other control tokens, such as those around a
        thought, are read as in any text. Raises ObservedTextError as :meth:`following` does."""
        harmless = [self._names.sub("name7", text) for text in observed]
        harmless += [self._special.sub("name7", text) for text in spoken]
        meant = self.control(self.tokens(render(harmless)))
        return self._read(render, meant, observed, spoken, lambda text, tokens: tokens(text))

    def _read(
        self,
        render: Callable[[Sequence[str]], str],
        meant: list[int],
        observed: Sequence[str],
        spoken: Sequence[str],
        read: Callable[[str, Callable[[str], list[int]]], list[int]],
    ) -> list[int]:
        found = read(render([*observed, *spoken]), self.tokens)
        if self.control(found) == meant:
            return found
        spelled = {name for text in observed for name in self._names.findall(text)}
        refused = self._refuse and bool(spelled or not spoken)
        names = ", ".join(sorted(spelled | {name for text in spoken for name in self._special.findall(text)}))
        if refused or not self._tokenizer.is_fast:
            only = "" if refused else ", which only a fast tokenizer can read as plain text"
            raise ObservedTextError(f"An observed text spells out control tokens ({names}){only}.")
        found = read(*self._with_marks(render, observed, spoken))
        if self.control(found) != meant:
            raise ObservedTextError(f"An observed text spells out control tokens in disguise ({names}).")
        return found

    def going_on(self, text: str) -> list[int]:
        """The tokens of a text that continues a row and whose control tokens are meant."""
        return self._continued(text, self.tokens)

    def _continued(self, text: str, tokens: Callable[[str], list[int]]) -> list[int]:
        found = tokens(text)
        if not self._anchor or not found or found[0] in self._numbers:
            return found
        anchor = _MARK + self._anchor if self._anchor in self._control and tokens != self.tokens else self._anchor
        return tokens(anchor + text)[len(tokens(anchor)) :]

    def _goes_on(self, anchor: str) -> bool:
        begun = self.tokens("a")
        row = [*begun, *self.tokens(anchor + "a")[len(self.tokens(anchor)) :]]
        return self.text(row) == f"{self.text(begun)}a"

    def text(self, tokens: list[int] | IntArray) -> str:
        """What the tokens say, control tokens included."""
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _with_marks(
        self, render: Callable[[Sequence[str]], str], observed: Sequence[str], spoken: Sequence[str]
    ) -> tuple[str, Callable[[str], list[int]]]:
        """The text with a mark before each control token that is meant, and the function that reads it so."""
        hidden: list[str] = []
        cover = "hiddenname"
        while any(cover in text for text in (*observed, *spoken)):
            cover += "x"

        def hide(name: re.Match[str]) -> str:
            hidden.append(name[0])
            return f"{cover}{len(hidden) - 1}{cover}"

        hiding = [self._names.sub(hide, text) for text in observed] + [self._special.sub(hide, text) for text in spoken]
        marked = self._names.sub(lambda name: _MARK + name[0], render(hiding))
        return re.sub(f"{cover}([0-9]+){cover}", lambda place: hidden[int(place[1])], marked), self._marked_tokens

    def _marked_tokens(self, text: str) -> list[int]:
        copy, numbers = self._copy
        return [numbers.get(token, token) for token in copy.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer with a mark before the name of each control token, and its own number for each that has another
        one there."""
        from tokenizers import Tokenizer

        made = json.loads(self._tokenizer.backend_tokenizer.to_str())
        names: dict[str, int] = {}
        for token in made["added_tokens"]:
            number = token["id"]
            if token["content"] in self._control:
                token["content"] = _MARK + token["content"]
            names[token["content"]] = number
        copy = Tokenizer.from_str(json.dumps({**made, "post_processor": None, "truncation": None, "padding": None}))
        return copy, {copy.token_to_id(name) or 0: number for name, number in names.items()}


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Longest first, so that none is found within another one."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
