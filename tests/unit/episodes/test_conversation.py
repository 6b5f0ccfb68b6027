"""A row of an episode says what the chat template would say, and holds what was sampled, token by token."""

# ruff: noqa: RUF001 - the vertical lines of DeepSeek's tokens are wide
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.observed_tokens import ObservedTextError, ObservedTokens
from asyncrlhf.episodes.turn_frames import TurnFrames
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.tasks.task import PromptEncoder
from tests.unit.episodes.chat_shapes import FOLDER, SHAPES, Shape, read, sampled, tokenizer_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
USER, KEEPING = {"role": "user", "content": "What?"}, sorted(set(SHAPES) - {"deepseekv3", "deepseek_r1_distill"})
WITH_TOOLS = sorted(name for name, shape in SHAPES.items() if shape.call)
WORDS = st.text("ab1 \n\t{}\"'é漢😀<|>", min_size=1, max_size=12).filter(str.strip)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
FEW = settings(max_examples=15, deadline=None)


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def assistant(shape: Shape, text: str, ended: bool = True) -> tuple[dict[str, Any], str]:
    """The message of an answer, and the text that a model samples for it."""
    text = text.strip() if shape.strips or not shape.end else text  # an end of two lines is seen in the text
    return {"role": "assistant", "content": text}, shape.before + text + (shape.end if ended else "")


def calling(shape: Shape, arguments: dict[str, str], ended: bool = True) -> tuple[dict[str, Any], str]:
    assert shape.call
    call = {"type": "function", "id": "abcdef123", "function": {"name": "add", "arguments": arguments}}
    sampled_text = shape.call("add", arguments) + ((shape.call_end or shape.end) if ended else "")
    return {"role": "assistant", "content": "", "tool_calls": [call]}, sampled_text


def as_whole(shape: Shape, text: str) -> str:
    """The template's own text; a model's ``<|return|>`` stays where the template has ``<|end|>``."""
    if shape is SHAPES["gptoss"]:
        head, *turns = text.split("<|start|>assistant<|channel|>final")
        text = "<|start|>assistant<|channel|>final".join(
            [head, *(t.replace("<|end|>", "<|return|>", 1) for t in turns)]
        )
    return text


@pytest.mark.parametrize("merging", [True, False], ids=["merges", "bytes"])
@pytest.mark.parametrize("name", sorted(set(KEEPING) - {"inst"}))
def test_rows_of_questions_say_what_the_template_says(name: str, merging: bool) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template, merging)
    conversation = Conversation(tokenizer)

    @FEW
    @given(texts=st.lists(WORDS, min_size=5, max_size=5), ended=st.booleans(), seed=st.integers(0, 99))
    def check(texts: list[str], ended: bool, seed: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": texts[0]}]
        row = [conversation.opening(messages)]
        for answer, question in (texts[1:3], texts[3:5]):
            message, text = assistant(shape, answer, ended)
            turn, observed = sampled(tokenizer, text, seed), {"role": "user", "content": question}
            row += [np.asarray(turn, dtype=np.int64), conversation.suffix(turn, [observed])]
            messages += [message, observed]
        whole = rendered(tokenizer, messages)
        assert read(tokenizer, *row) == (as_whole(shape, whole) if ended else whole)

    check()


@pytest.mark.parametrize("merging", [True, False], ids=["merges", "bytes"])
@pytest.mark.parametrize("name", sorted(set(WITH_TOOLS) - {"inst"}))
def test_rows_of_calls_say_what_the_template_says(name: str, merging: bool) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template, merging)
    conversation = Conversation(tokenizer)

    @FEW
    @given(texts=st.lists(WORDS, min_size=3, max_size=3), ended=st.booleans(), seed=st.integers(0, 99))
    def check(texts: list[str], ended: bool, seed: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": texts[0]}]
        row = [conversation.opening(messages)]
        for result in texts[1:]:
            message, text = calling(shape, {"a": "12", "b": "x y"}, ended)
            turn, observed = sampled(tokenizer, text, seed), {"role": "tool", "name": "add", "content": result}
            row += [np.asarray(turn, dtype=np.int64), conversation.suffix(turn, [observed])]
            messages += [message, {**observed, "tool_call_id": "abcdef123"}]
        assert read(tokenizer, *row) == rendered(tokenizer, messages)

    check()


def test_a_template_that_writes_spaces_around_a_turn() -> None:
    """The model samples its end without the template's space; the row has what was sampled."""
    tokenizer = tokenizer_for(SHAPES["inst"].template)
    conversation = Conversation(tokenizer)
    turn = sampled(tokenizer, " yes</s>", 1)
    assert read(tokenizer, conversation.suffix(turn, [USER])) == "[INST] What?[/INST]"
    assert read(tokenizer, conversation.suffix(sampled(tokenizer, " yes </s>", 1), [USER])) == "[INST] What?[/INST]"
    assert read(tokenizer, conversation.suffix(sampled(tokenizer, " yes", 1), [USER])) == " </s>[INST] What?[/INST]"
    result = {"role": "tool", "name": "add", "content": "3", "tool_call_id": "abcdef123"}
    text = calling(SHAPES["inst"], {"a": "1"})[1]
    suffix = conversation.suffix(sampled(tokenizer, text, 1), [result])
    assert read(tokenizer, suffix) == '[TOOL_RESULTS]{"content": "3", "id": "abcdef123"}[/TOOL_RESULTS]'
    with pytest.raises(ObservedTextError, match="nine characters"):
        conversation.suffix([], [{**result, "tool_call_id": "a"}])
    hostile_id = conversation.suffix([], [{**result, "tool_call_id": "</s></s>a"}])
    assert read(tokenizer, hostile_id) == ' </s>[TOOL_RESULTS]{"content": "3", "id": "call00000"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_what_a_template_changes_is_noted(name: str) -> None:
    shape, conversation = SHAPES[name], Conversation(tokenizer_for(SHAPES[name].template))
    assert conversation.rewrites_history == bool(shape.changes) and bool(conversation.note) == bool(shape.changes)
    for words in shape.changes:
        assert words in conversation.note
    assert conversation.note.count("\n") == 0 and conversation.note[-1:] in ("", ".")


def test_thoughts_dropped_before_results_are_noted() -> None:
    template = (
        "{% for m in messages %}{% if m.thinking and (loop.last or messages[loop.index].role != 'tool') %}"
        "({{ m.thinking }}){% endif %}{{ m.content }}{{ m.tool_calls | default('') }}<|im_end|>{% endfor %}"
    )
    note = Conversation(tokenizer_for(template)).note
    assert "drops the thoughts of earlier turns when the result of a tool follows" in note


def test_texts_around_a_turn_hold_whole_control_tokens() -> None:
    """``<|assistant|>`` and Phi's ``</s>``, with which a conversation ends, both begin with ``<``."""
    tokenizer = tokenizer_for(SHAPES["phi3"].template)
    frames = TurnFrames(tokenizer, ObservedTokens(tokenizer), {})
    assert (frames.generation_prompt, frames.end, frames.last_end) == ("<|assistant|>\n", "<|end|>\n", "")


def test_a_template_that_drops_results_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls | default('') }}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"does not render messages of role tool after an assistant's turn; allowed: "
    ):
        Conversation(tokenizer_for(template)).suffix([], [{"role": "tool", "content": "3"}])


def test_thoughts_that_a_template_drops_stay_in_the_row() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    conversation = Conversation(tokenizer)
    turn = sampled(tokenizer, "<think>\nwhy\n</think>\n\nyes<|im_end|>", 3)
    row = read(tokenizer, conversation.opening([USER]), turn, conversation.suffix(turn, [USER]))
    messages = [USER, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes"}, USER]
    assert row.replace("<think>\nwhy\n</think>\n\n", "") == rendered(tokenizer, messages)


def test_an_opened_thought_stays_in_the_row() -> None:
    """DeepSeek's generation begins with ``<think>``, which its template leaves out of earlier turns."""
    tokenizer = tokenizer_for(SHAPES["deepseekv3"].template)
    conversation = Conversation(tokenizer)
    turn = sampled(tokenizer, "why</think>yes<｜end▁of▁sentence｜>", 3)
    row = read(tokenizer, conversation.opening([USER]), turn, conversation.suffix(turn, [USER]))
    messages = [USER, {"role": "assistant", "content": "yes"}, USER]
    assert row.replace("<think>\nwhy</think>", "", 1) == rendered(tokenizer, messages)
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
    call += "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    observed = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4")]
    for ended, missing in ((True, ""), (False, "<｜end▁of▁sentence｜>")):
        turn = sampled(tokenizer, call + "<｜end▁of▁sentence｜>" * ended, 3)
        assert read(tokenizer, conversation.suffix(turn, observed)) == (
            f"{missing}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>"
            "<｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        )


@pytest.mark.parametrize(
    "name, sampled_end, suffix",
    [
        ("chatml", "", "<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "<|im_end|>", "\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "<|im_end|>\n", "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "</s>", "<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"),
        ("gptoss", "<|return|>", "<|start|>user<|message|>What?<|end|><|start|>assistant"),
        ("gptoss", "<|end|>", "<|start|>user<|message|>What?<|end|><|start|>assistant"),
        ("gptoss", "", "<|end|><|start|>user<|message|>What?<|end|><|start|>assistant"),
        ("glm4moe", "", "<|user|>\nWhat?<|assistant|>"),
        ("glm4moe", "<|user|>", "\nWhat?<|assistant|>"),
        ("no_tokens", "", "\n\nuser: What?\n\nassistant: "),
        ("no_tokens", "\n\n", "user: What?\n\nassistant: "),
        ("phi3", "", "<|end|>\n<|user|>\nWhat?<|end|>\n<|assistant|>\n"),
        (
            "cohere2",
            "<|END_RESPONSE|>",
            "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>What?<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
        ),
    ],
)
def test_a_suffix_begins_with_what_is_missing_of_the_end(name: str, sampled_end: str, suffix: str) -> None:
    tokenizer = tokenizer_for(SHAPES[name].template)
    turn = [*sampled(tokenizer, "yes", 0), *tokenizer(sampled_end, add_special_tokens=False).input_ids]
    assert read(tokenizer, Conversation(tokenizer).suffix(turn, [USER])) == suffix
    assert read(tokenizer, Conversation(tokenizer).suffix(np.asarray(turn), [USER])) == suffix


def test_sampled_tokens_differ_from_those_of_the_text() -> None:
    """Which is why they are never made again from the text: the property tests would not notice otherwise."""
    tokenizer = tokenizer_for(SHAPES["chatml"].template)
    turn = sampled(tokenizer, "hello\n\nhello<|im_end|>", 1)
    conversation = Conversation(tokenizer)
    row = [*conversation.opening([USER]), *turn, *conversation.suffix(turn, [USER])]
    assert tokenizer(read(tokenizer, row), add_special_tokens=False).input_ids != row


@pytest.mark.parametrize("name", KEEPING)
def test_a_suffix_is_read_as_a_whole(name: str) -> None:
    """Words merge over the border between observed text and template, as in a rendering of the whole conversation."""
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template)
    suffix = Conversation(tokenizer).suffix(sampled(tokenizer, "yes" + shape.end, 0), [USER])
    text = rendered(tokenizer, [USER, assistant(shape, "yes")[0], USER])
    whole = tokenizer(text, add_special_tokens=False).input_ids
    assert whole[len(whole) - len(suffix) :] == suffix.tolist()


def hostile(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    names = [name for name in tokenizer.get_added_vocab() if name.strip()]
    doubled = [f"a{name}{name} b" for name in names]
    return [*names, "".join(names), *doubled, *(f"{name[:2]}{name}{name[2:]}" for name in names)]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_observed_text_makes_no_control_tokens(name: str) -> None:
    """The row says the same as the template, and has only the control tokens of the template's own text."""
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template)
    conversation, refusing = Conversation(tokenizer), Conversation(tokenizer, special_in_observed="refuse")
    control = {number for text, number in tokenizer.get_added_vocab().items() if text.strip()}
    role = {"role": "tool", "name": "add"} if shape.call else {"role": "user"}
    harmless = conversation.suffix([], [{**role, "content": "PLACE"}])
    meant = [token for token in harmless if token in control]
    for text in hostile(tokenizer):
        observed = {**role, "content": text}
        suffix = conversation.suffix([], [observed])
        assert [token for token in suffix if token in control] == meant, text
        assert read(tokenizer, suffix) == read(tokenizer, harmless).replace("PLACE", text), text
        with pytest.raises(ObservedTextError, match="control tokens"):
            refusing.suffix([], [observed])
    assert refusing.suffix([], [{**role, "content": "a    b"}]).tolist()  # a run of spaces is text, if one token
    assert refusing.suffix([], [{**role, "content": "PLACE"}]).tolist() == harmless.tolist()


def test_names_and_ids_make_no_control_tokens() -> None:
    """gpt-oss writes the name of a tool before its result, and a model may sample any name."""
    tokenizer = tokenizer_for(SHAPES["gptoss"].template)
    conversation = Conversation(tokenizer)
    observed = {"role": "tool", "name": "a<|end|>", "content": "no such tool", "tool_call_id": "<|end|>"}
    suffix = conversation.suffix([], [observed])
    assert read(tokenizer, suffix).startswith("<|call|><|start|>functions.a<|end|> to=assistant")
    assert suffix.tolist().count(tokenizer.get_added_vocab()["<|end|>"]) == 1
    with pytest.raises(ObservedTextError):
        Conversation(tokenizer, special_in_observed="refuse").suffix([], [observed])


def test_control_tokens_in_disguise() -> None:
    """Neither the mark of the hidden tokenizer nor the words that hide names let a control token through."""
    tokenizer = tokenizer_for(SHAPES["qwen2_5"].template)
    conversation, end = Conversation(tokenizer), tokenizer.get_added_vocab()["<|im_end|>"]
    for text in ("\ue0f3<|im_end|>", "\ue0f3<|im_end|><|im_end|>", "hiddenname0hiddenname<|im_end|>"):
        try:
            suffix = conversation.suffix([end], [{"role": "tool", "name": "add", "content": text}])
        except ObservedTextError:
            continue
        assert suffix.tolist().count(end) == 1 and text in read(tokenizer, suffix)


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    """JSON can spell them, and a tool may echo its arguments."""
    tokenizer = tokenizer_for(SHAPES["qwen2_5"].template)
    suffix = Conversation(tokenizer).suffix([], [{"role": "tool", "name": "a\ud800", "content": "b\udc00"}])
    assert "b?" in read(tokenizer, suffix)


def test_several_results_follow_one_turn() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen2_5"].template)
    conversation, end = Conversation(tokenizer), tokenizer.get_added_vocab()["<|im_end|>"]
    observed = [{"role": "tool", "name": name, "content": name} for name in ("one", "", "three")]
    assert read(tokenizer, conversation.suffix([end], [*observed, USER])) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\n\n</tool_response>\n"
        "<tool_response>\nthree\n</tool_response><|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ValueError, match="at least one"):
        conversation.suffix([end], [])


def test_templates_differ_in_how_many_calls_a_turn_has() -> None:
    """Llama's have one, and others look a result's call up by its id."""
    tokenizer = tokenizer_for(SHAPES["llama3_1"].template)
    observed = [{"role": "tool", "name": name, "content": name} for name in ("one", "two")]
    head = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    assert read(tokenizer, Conversation(tokenizer).suffix([], observed)) == (
        f'<|eot_id|>{head}"one"<|eot_id|>{head}"two"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    tokenizer = tokenizer_for(
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% if m.tool_calls %}CALL {% for c in m.tool_calls %}"
        "{% set ns.ids = ns.ids + [c.id] %}{{ c.function.name }}{{ c.function.arguments }};{% endfor %}<|im_end|>"
        "{% elif m.role == 'tool' %}{{ ns.ids.index(m.tool_call_id) if m.tool_call_id in ns.ids else "
        "raise_exception('no such call') }}:{{ m.content }}<|im_end|>{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    for ids in ({}, {"tool_call_id": "b"}):
        suffix = Conversation(tokenizer).suffix([], [observed[0], {**observed[1], **ids}])
        assert read(tokenizer, suffix) == "<|im_end|>0:one<|im_end|>1:two<|im_end|>"


def test_a_tokenizer_may_have_a_template_of_its_own_for_tools() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_for(SHAPES["qwen2_5"].template).backend_tokenizer)
    tokenizer.chat_template = {"default": SHAPES["chatml"].template, "tool_use": SHAPES["qwen2_5"].template}
    conversation = Conversation(tokenizer)
    assert read(tokenizer, conversation.opening([USER])) == "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert "<tool_response>" in read(tokenizer, conversation.suffix([], [{"role": "tool", "content": "3"}]))


def test_templates_with_tools_are_those_that_trl_finds() -> None:
    from trl.chat_template_utils import supports_tool_calling

    found = 0
    for path in sorted(FOLDER.glob("*.jinja")):
        tokenizer = tokenizer_for(path.read_text(encoding="utf-8"), merging=False)
        try:
            conversation = Conversation(tokenizer)
        except ConfigError as error:
            assert "does not render a user's message" in str(error), path
            continue
        try:
            conversation.suffix([], [{"role": "tool", "name": "add", "content": "3"}])
        except ConfigError as error:
            assert "does not render messages of role tool" in str(error), path
            assert not supports_tool_calling(tokenizer), path
        else:
            assert supports_tool_calling(tokenizer), path
            found += 1
    assert found >= 20


def test_an_opening_is_that_of_a_plain_rollout() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen2_5"].template)
    conversation, encode = Conversation(tokenizer), PromptEncoder(tokenizer, TaskConfig(chat_template=True))
    for given_ in ("What?", [USER], [USER, {"role": "assistant", "content": "It"}]):
        assert conversation.opening(given_).tolist() == encode("p", given_).token_ids.tolist()
    with_tools = read(tokenizer, conversation.opening([USER], [TOOL]))
    assert '"name": "add"' in with_tools and with_tools.endswith("<|im_start|>assistant\n")


def test_keywords_reach_the_template() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    conversation = Conversation(tokenizer, template_kwargs={"enable_thinking": False})
    empty = "<think>\n\n</think>\n\n"
    assert read(tokenizer, conversation.opening([USER])).endswith(empty)
    assert read(tokenizer, conversation.suffix([], [USER])).endswith(empty)
    assert f"leaves out {empty!r}, with which a generation begins" in conversation.note


def test_refusals_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"^Tools need a chat template.*has none; allowed: "):
        Conversation(plain_tokenizer()).opening("What?", [TOOL])
    with pytest.raises(ConfigError, match=r"does not render messages of role tool.*; allowed: "):
        Conversation(tokenizer_for(SHAPES["phi3"].template)).opening("What?", [TOOL])
    with pytest.raises(ConfigError, match=r"^No response template is known.*; allowed: "):
        Conversation(tokenizer_for(SHAPES["deepseekv3"].template)).opening("What?", [TOOL])
    with pytest.raises(ConfigError, match=r"refuses the opening of an episode: .*alternate"):
        Conversation(tokenizer_for(SHAPES["gemma"].template)).opening([USER, USER])
    with pytest.raises(ConfigError, match=r"has no messages; allowed: "):
        Conversation(tokenizer_for(SHAPES["gemma"].template)).opening([])


def plain_tokenizer(scheme: str = "") -> PreTrainedTokenizerFast:
    """Without a chat template: of bytes, or with a mark of words as SentencePiece has, ``scheme`` of Metaspace."""
    if not scheme:
        tokenizer = tokenizer_for(SHAPES["chatml"].template)
        plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
        return plain
    letters = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz.?\n<|>/_", "▁yes"]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s")]
    vocabulary = {text: number for number, text in enumerate([*letters, "▁y", "▁ye"])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["", "first", "always", "never"])
def test_plain_texts_follow_each_other(scheme: str) -> None:
    """Nothing comes between them, not even the space with which some tokenizers mark a text's beginning."""
    tokenizer = plain_tokenizer(scheme)
    conversation = Conversation(tokenizer)
    opening = conversation.opening("why?")
    assert opening.tolist() == tokenizer("why?").input_ids
    assert (conversation.rewrites_history, conversation.note) == (False, "")
    turn = tokenizer("no", add_special_tokens=False).input_ids
    suffix = conversation.suffix(turn, [{"role": "user", "content": "but"}, {"role": "tool", "content": " yes</s>"}])
    start = read(tokenizer, opening, turn)
    assert read(tokenizer, opening, turn, suffix) == f"{start}but yes</s>"
    assert tokenizer.eos_token_id not in suffix
    assert conversation.parse(turn).text == "no" and conversation.parse(turn).tool_calls == ()
    with pytest.raises(ObservedTextError, match="</s>"):
        Conversation(tokenizer, special_in_observed="refuse").suffix(turn, [{"role": "user", "content": "</s>"}])


def test_the_packaged_model_has_plain_episodes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    conversation = Conversation(tokenizer)
    opening = conversation.opening([{"role": "user", "content": "1+2="}])
    suffix = conversation.suffix(opening, [{"role": "user", "content": "3+4="}])
    assert opening.tolist() == suffix.tolist()[: len(opening)] or read(tokenizer, suffix) == "3+4="
