"""A conversation as tokens: its opening, what follows each sampled turn, and what the turn says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import numpy as np

from asyncrlhf.episodes.observed_tokens import ObservedTextError, ObservedTokens
from asyncrlhf.episodes.rendering import call_id_of, encodable, whole_conversation
from asyncrlhf.episodes.replies import ParsedReply, ReplyReader, call_id, known_response_template
from asyncrlhf.episodes.turn_frames import Message, TurnFrames
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import IntArray

if TYPE_CHECKING:
    import transformers


class Conversation:
    """Makes the tokens of an episode's conversation; one serves all episodes of a worker.

    An episode is one row: the opening, a sampled turn, its suffix, a sampled turn, and so on. Sampled tokens are never
    decoded and tokenised again, so that the row holds what the model sampled. A suffix is what the chat template adds
    between two turns, found by rendering a small conversation.

    Some templates render an earlier turn otherwise than a last one: they drop thoughts or strip white space
    (``rewrites_history``; ``note`` is a sentence that says what, empty if nothing). With ``history=keep`` what was
    sampled stays in the row as it is: the model sees its own thoughts of earlier turns, which it would not see if each
    turn's prompt were rendered anew. With ``history=fork`` it sees what a server would show it: where the rendering
    says something else than the row, the next turn follows the rendering, as another branch of the row
    (:meth:`rewritten`).

    Without a chat template all is plain text: texts follow each other, and nothing is added between them.

    ``special_in_observed``: what to do with an observed text that spells out special tokens: ``escape`` tokenises them
    as plain text, ``refuse`` raises ObservedTextError. ``template_kwargs`` go to the chat template.
    ``response_template``: how to read replies, if neither the tokenizer nor TRL knows it (transformers' format).
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        history: Literal["keep", "fork"] = "keep",
        special_in_observed: Literal["escape", "refuse"] = "escape",
        template_kwargs: Mapping[str, Any] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self.forks = tokenizer, history == "fork"
        self._response_template = response_template
        written = f"{tokenizer.chat_template or ''}{response_template or ''}"
        self._tokens = ObservedTokens(tokenizer, written, refuse=special_in_observed == "refuse")
        self._frames = None
        if tokenizer.chat_template:
            self._frames = TurnFrames(tokenizer, self._tokens, template_kwargs or {})
        changes = self._frames.changes if self._frames else ()
        self.rewrites_history = bool(changes)
        done = "keeps them as they were sampled (episode.history=keep)"
        if self.forks:
            done = "shows each turn what the template writes, in a branch of its own (episode.history=fork)"
        self.note = (
            f"The chat template rewrites earlier turns when it renders a whole conversation: it {_listed(changes)}; an "
            f"episode {done}."
            if changes
            else ""
        )

    def opening(self, messages: str | Sequence[Message], tools: Sequence[Message] = ()) -> IntArray:
        """[P] the prompt: ``messages`` (a text is one message of the user) and the beginning of the model's turn. A
        last message of the assistant is continued. ``tools``: JSON schemas, ``{"type": "function", "function": ...}``.

        Raises ConfigError if the template refuses the messages, or if the model has no tools.
        """
        if self._frames is None:
            self._refuse_plain_tools(tools)
            text = messages if isinstance(messages, str) else "".join(str(m["content"]) for m in messages)
            return _array(self._tokenizer(text).input_ids)
        if tools:
            self._check_tools()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages:
            raise ConfigError("The opening of an episode has no messages; allowed: at least one.")
        begun = messages[-1]["role"] == "assistant"
        try:
            return _array(self._tokens.tokens(self._frames.render(messages, tools, begun=begun)))
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"The chat template of model.path refuses the opening of an episode: {error}.") from error

    def suffix(self, sampled: Sequence[int] | IntArray, observed: Sequence[Message]) -> IntArray:
        """[S] the tokens between a sampled turn and the next one: what is missing of the turn's end, the ``observed``
        messages as the template renders them, and the beginning of the next turn.

        ``sampled``: the turn's tokens, at least its last ones; it may end with the end-of-turn token, with a part of
        what ends a turn, or without (a turn that was cut). ``observed``: messages of role ``user`` or ``tool`` with
        ``content``; those of role ``tool`` with the ``name`` of the tool, and the ``tool_call_id`` of its call.

        Special tokens that the observed texts or names spell out do not become special tokens. Raises ObservedTextError
        if that cannot be, or is refused, or if the template refuses the texts; ConfigError if the template has no such
        messages.
        """
        if not observed:
            raise ValueError("a suffix is made of at least one observed message")
        texts = [encodable(str(m["content"])) for m in observed]
        if self._frames is None:
            return _array(self._tokens.plain("".join(texts)))
        frames, count = self._frames, len(observed)
        names = [encodable(str(m.get("name") or "tool")) for m in observed]
        ids = [call_id_of(m.get("tool_call_id"), place) for place, m in enumerate(observed)]
        frame = frames.frame([{**m, "content": text} for m, text in zip(observed, texts, strict=True)])

        def render(given: Sequence[str]) -> str:
            parts = zip(observed, given[:count], given[count:], ids, strict=True)
            return frames.after_turn(frame, [_observed(*part) for part in parts])

        try:
            following = self._tokens.following(render, [*texts, *names], frame.control)
        except (jinja2.TemplateError, TypeError) as error:
            raise ObservedTextError(f"The chat template refuses an observed message: {error}.") from error
        return _array(following[self._already([int(t) for t in sampled[-_LONGEST_END:]], following, frame.end) :])

    def whole(self, messages: Sequence[Message], tools: Sequence[Message], opening: int) -> IntArray:
        """[n] the tokens of a conversation up to the beginning of the next turn. Its first ``opening`` messages are a
        prompt. Raises ObservedTextError and ConfigError as :func:`whole_conversation` does."""
        assert self._frames is not None, "without a chat template nothing is rendered"
        return _array(whole_conversation(self._frames, self._tokens, messages, tools, opening))

    def rewritten(
        self, row: IntArray, messages: Sequence[Message], tools: Sequence[Message], opening: int
    ) -> IntArray | None:
        """[n] :meth:`whole`, where it says something else than ``row`` [m], the tokens of the same conversation as it
        was sampled and continued. None if both say the same: what was sampled is not tokenised again. None with
        ``history=keep``, and without a chat template."""
        if not self.forks or self._frames is None or not messages:
            return None
        if opening and messages[opening - 1]["role"] == "assistant":  # which the first turn continued
            begun, turn = messages[opening - 1 : opening + 1]
            one = {**turn, "content": f"{begun['content']}{turn['content']}"}
            messages, opening = [*messages[: opening - 1], one, *messages[opening + 1 :]], opening - 1
        whole = self.whole(messages, tools, opening)
        return None if self._tokens.text(whole) == self._tokens.text(row) else whole

    def plain(self, text: str, *, begins: bool) -> IntArray:
        """[S] the tokens of a text as it is, without a template; the control tokens that it spells out are meant.
        ``begins``: it begins a row, and does not continue one."""
        return _array(self._tokenizer(text).input_ids if begins else self._tokens.going_on(text))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [str(self._tokenizer.decode([token])) for token in token_ids]

    def parse(self, token_ids: Sequence[int] | IntArray, tools: Sequence[Message] = ()) -> ParsedReply:
        """What a sampled turn says. ``tools``, the schemas of the opening, give the arguments their types. Without a
        chat template, or without tools, a reply is only text."""
        if self._frames is None or not tools:
            return ParsedReply(str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)))
        return self._reader.read(list(token_ids), tools)

    def _already(self, sampled: list[int], following: Sequence[int], end: str) -> int:
        """How many tokens of ``following``, which begins with the end of a turn, the turn ended with already."""
        control, of_end = set(self._tokens.control(following)), len(self._tokens.tokens(end))
        # Some templates write a space before the end-of-turn token, which a model need not sample.
        first = next((place for place, token in enumerate(following[: max(of_end, 1)]) if token in control), None)
        if first is None:  # the end is text, of which a part may also belong to the turn
            return of_end if of_end and sampled[-of_end:] == list(following[:of_end]) else 0
        last = next((p for p, token in enumerate(following) if p >= first and token not in control), len(following))
        for count in range(min(max(last, of_end) - first, len(sampled)), 0, -1):
            if sampled[-count:] == list(following[first : first + count]):
                return first + count
        last_end = self._frames.last_end if self._frames else ""
        if last_end and sampled[-1:] == self._tokens.tokens(last_end):
            return first + len(self._tokens.control(self._tokens.tokens(end)))
        return 0

    def _refuse_plain_tools(self, tools: Sequence[Message]) -> None:
        if tools:
            raise ConfigError(
                "Tools need a chat template, and the tokenizer of model.path has none; allowed: a model with a chat "
                "template, or an environment without tools."
            )

    def _check_tools(self) -> None:
        """Raise ConfigError unless the template renders calls and their results, and replies can be read."""
        assert self._frames is not None
        self._frames.frame([_observed({"role": "tool"}, "result", "name", call_id(0))])
        _ = self._reader

    @cached_property
    def _reader(self) -> ReplyReader:
        assert self._frames is not None
        template = self._response_template or known_response_template(self._tokenizer)
        return ReplyReader(self._tokenizer, template, self._frames.generation_prompt, self._frames.call_marks())


_LONGEST_END = 16  # tokens; more than any template ends a turn with


def _observed(message: Message, text: str, name: str, call: str) -> Message:
    if message["role"] != "tool":
        return {**message, "content": text}
    return {**message, "content": text, "name": name, "tool_call_id": call}


def _array(ids: Any) -> IntArray:
    return np.asarray(ids, dtype=np.int64)


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
