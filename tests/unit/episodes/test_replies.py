"""What a sampled turn says is read by response templates; what cannot be read is said to be malformed, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.replies import ParsedReply, ToolCall
from asyncrlhf.errors import ConfigError
from tests.unit.episodes.chat_shapes import SHAPES, sampled, tokenizer_for, trl_template

READABLE = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "gptoss", "glm4moe", "lfm2_v2")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]


def parsed(name: str, text: str, **options: Any) -> ParsedReply:
    template = SHAPES[name].template if name in SHAPES else trl_template(name)
    tokenizer = tokenizer_for(template)
    return Conversation(tokenizer, **options).parse(sampled(tokenizer, text, 5), TOOLS)


@pytest.mark.parametrize("name", READABLE)
def test_calls_are_read(name: str) -> None:
    shape = SHAPES[name]
    assert shape.call
    end = shape.call_end or shape.end

    @settings(max_examples=15, deadline=None)
    @given(number=st.integers(-999, 999), word=st.text("abé漢x-", min_size=1, max_size=8))
    def check(number: int, word: str) -> None:
        assert shape.call
        # Only GLM's and LFM's calls have untyped arguments; the tool's schema says that 3 is a number.
        reply = parsed(name, shape.call("add", {"a": number, "b": word}) + end)
        assert reply == ParsedReply("", (ToolCall("add", {"a": number, "b": word}, "call00000"),), "", "")

    check()


@pytest.mark.parametrize("name", READABLE)
def test_answers_are_read(name: str) -> None:
    shape = SHAPES[name]
    reply = parsed(name, f"{shape.before}It is 3.{shape.end}")
    assert (reply.text, reply.tool_calls, reply.malformed) == ("It is 3.", (), "")


def test_thoughts_and_several_calls_are_read() -> None:
    call = SHAPES["qwen3"].call
    assert call
    text = f"<think>\nwhy\n</think>\n\nFirst:\n{call('add', {'a': 1})}\n{call('other', {})}<|im_end|>"
    calls = (ToolCall("add", {"a": 1}, "call00000"), ToolCall("other", {}, "call00001"))
    assert parsed("qwen3", text) == ParsedReply("First:", calls, "", "why")
    thoughts = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    assert parsed("gptoss", thoughts) == ParsedReply("3", (), "", "why")


def test_a_thought_that_the_prompt_opened_is_read() -> None:
    """Its opening is part of the prompt, not of the reply."""
    call = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>"
    reply = parsed("qwen3_5_think", f"why\n</think>\n\n{call}")
    assert reply == ParsedReply("", (ToolCall("add", {"a": 7}, "call00000"),), "", "why")


def test_a_thought_may_speak_of_calls() -> None:
    reply = parsed("qwen3", "<think>\nno <tool_call> now\n</think>\n\n3<|im_end|>")
    assert (reply.text, reply.malformed) == ("3", "")


MALFORMED: Mapping[str, tuple[str, str]] = {
    "no JSON": ('<tool_call>\n{"name": add}\n</tool_call>', "JSON"),
    "cut": ('<tool_call>\n{"name": "add", "argu', "JSON"),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', "it has no name"),
    "blank name": ('<tool_call>\n{"name": " ", "arguments": {}}\n</tool_call>', "it has no name"),
    "no object": ("<tool_call>\n[1, 2]\n</tool_call>", "it has no name"),
    "a list of arguments": (
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        "arguments of add are list",
    ),
    "arguments that are no JSON": ('<tool_call>\n{"name": "add", "arguments": "1,"}\n</tool_call>', "Extra data"),
    "deep": (f'<tool_call>\n{{"name": "add", "arguments": {"[" * 20000}', "recursion"),
    "only an end": ('{"name": "add", "arguments": {}}\n</tool_call>', "its </tool_call> belongs to no whole call"),
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_malformed_calls(name: str) -> None:
    text, reason = MALFORMED[name]
    reply = parsed("qwen3_instruct_2507", f"Now: {text}<|im_end|>" if name != "cut" else text)
    assert reply.malformed.startswith("A tool call cannot be read: ") and reason in reply.malformed
    assert reply.tool_calls == () and text[-20:].strip("\n") in reply.text and "\n" not in reply.malformed
    assert len(reply.malformed) < 400


def test_malformed_calls_of_other_models() -> None:
    assert (
        "its <tool_call> belongs" in parsed("qwen3_5_nothink", "<tool_call>\nadd(3)\n</tool_call><|im_end|>").malformed
    )
    assert "JSON" in parsed("llama3_1", '{"name": "add", "parameters": {3}}<|eot_id|>').malformed
    assert "JSON" in parsed("gptoss", " to=functions.add<|channel|>commentary json<|message|>{3<|call|>").malformed


def test_arguments_without_value_and_as_text() -> None:
    without = parsed("qwen3_instruct_2507", '<tool_call>\n{"name": "add", "arguments": null}\n</tool_call><|im_end|>')
    text = parsed("qwen3_instruct_2507", '<tool_call>\n{"name": "add", "arguments": "{}"}\n</tool_call><|im_end|>')
    assert without.tool_calls == text.tool_calls == (ToolCall("add", {}, "call00000"),)


def test_without_tools_a_reply_is_text() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    turn = sampled(tokenizer, "<tool_call>\n{3<|im_end|>", 1)
    assert Conversation(tokenizer).parse(turn) == ParsedReply("<tool_call>\n{3")


def test_a_response_template_of_ones_own() -> None:
    """For chat templates that neither the tokenizer nor TRL knows; and a tokenizer's own comes before TRL's."""
    own = {
        "defaults": {"role": "assistant"},
        "start_anchor": "[/INST]",
        "fields": {
            "tool_calls": {
                "open": "[TOOL_CALLS][",
                "close_pattern": r"\]\s*</s>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "id": "{content.id}", "function": "{content}"},
            },
            "content": {"close_pattern": "</s>", "content": "text"},
        },
    }
    shape = SHAPES["inst"]
    assert shape.call
    text = shape.call("add", {"a": 1}) + "</s>"
    with pytest.raises(ConfigError, match="No response template is known"):
        parsed("inst", text)
    assert parsed("inst", text, response_template=own).tool_calls == (ToolCall("add", {"a": 1}, "abcdef123"),)
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    assert getattr(tokenizer, "response_template", None) is None  # TRL's went to a stand-in
