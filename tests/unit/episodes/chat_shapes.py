"""Chat templates in public use, with a small tokenizer each, and the text that a model of each samples."""

# ruff: noqa: RUF001 - the vertical lines of DeepSeek's tokens are wide
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With a space before each turn of the assistant, ids of calls that it checks, and the tools before the last question.
INST = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}] </s>{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + ' </s>' }}{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ m.content | tojson }}, "id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
NO_TOKENS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONTROL = re.compile(
    r"<\|?[a-zA-Z_]+\|>|<\|[a-zA-Z_]+\|?>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z_]+\]"
)
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Shape:
    """``end``: what a model samples at the end of a turn. ``call``: what it samples for a call of a tool. ``changes``:
    words of the note, none if the template keeps earlier turns. ``strips``: it does so around a turn."""

    template: str
    end: str
    call: Callable[[str, Mapping[str, Any]], str] | None = None
    changes: tuple[str, ...] = ()
    strips: bool = False
    before: str = ""  # what it samples before the text of an answer
    call_end: str = ""  # instead of ``end``


def trl_template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def llama(name: str, arguments: Mapping[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'


def inst(name: str, arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {text}, "id": "abcdef123"}}]'


def harmony(name: str, arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f" to=functions.{name}<|channel|>commentary json<|message|>{text}"


def pythonic(name: str, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}='{value}'" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({given})]<|tool_call_end|>"


def glm(name: str, arguments: Mapping[str, Any]) -> str:
    given = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"\n<think></think>\n<tool_call>{name}\n{given}</tool_call>"


STRIPS, DROPS = "strips white space", "drops the thoughts"
SHAPES = {
    "chatml": Shape(CHATML, "<|im_end|>"),
    "no_tokens": Shape(NO_TOKENS, ""),
    "inst": Shape(INST, "</s>", inst, ("changes the messages before a turn",)),
    "qwen2_5": Shape(trl_template("qwen2_5"), "<|im_end|>", hermes),
    "qwen3": Shape(trl_template("qwen3"), "<|im_end|>", hermes, (DROPS, "begins a last turn")),
    "qwen3_instruct_2507": Shape(trl_template("qwen3_instruct_2507"), "<|im_end|>", hermes),
    "llama3": Shape(trl_template("llama3"), "<|eot_id|>", None, (STRIPS,), True),
    "llama3_1": Shape(trl_template("llama3_1"), "<|eot_id|>", llama, (STRIPS,), True),
    "gemma": Shape(trl_template("gemma"), "<end_of_turn>", None, (STRIPS,), True),
    "gemma3": Shape(trl_template("gemma3"), "<end_of_turn>", None, (STRIPS,), True),
    "deepseekv3": Shape(
        trl_template("deepseekv3"), "<｜end▁of▁sentence｜>", None,
        ("leaves out '<think>", DROPS, "writes later calls and results of tools differently"),
    ),
    "deepseek_r1_distill": Shape(
        trl_template("deepseek_r1_distill"), "<｜end▁of▁sentence｜>", None, ("leaves out '<think>", DROPS)
    ),
    "gptoss": Shape(
        trl_template("gptoss"), "<|return|>", harmony, (DROPS, "ends a last turn with <|return|>"), False,
        "<|channel|>final<|message|>", "<|call|>",
    ),
    "phi3": Shape(trl_template("phi3"), "<|end|>"),
    "cohere": Shape(trl_template("cohere"), "<|END_OF_TURN_TOKEN|>", None, (STRIPS,), True),
    "cohere2": Shape(trl_template("cohere2"), "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "glm4moe": Shape(
        trl_template("glm4moe"), "<|user|>", glm, (STRIPS, DROPS), True, "\n<think></think>\n", "<|observation|>"
    ),
    "lfm2": Shape(trl_template("lfm2"), "<|im_end|>"),
    "lfm2_v2": Shape(trl_template("lfm2_v2"), "<|im_end|>", pythonic),
}  # fmt: skip


@cache
def tokenizer_for(template: str, merging: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the template's control tokens. ``merging``: its merges cross the borders of words, lines
    and turns, because no words are split off before them; else it has none."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(["<s>", "</s>", *CONTROL.findall(template)]))
    ends = ("\n", "\nuser\n", "\n\n", " a", '"}')
    text = [f"{a}{b}" for a in ("hello", "1 + 2 =", "\n\n", " .", "}", '"') for b in ends]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + (150 if merging else 0),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[name for name in special if name not in PLAIN_ADDED],
    )
    made.train_from_iterator(text * 9, trainer)
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN_ADDED if name in template])
    made.add_tokens([AddedToken("    ", special=False, normalized=False)])  # as of some models: text, no control token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def read(tokenizer: PreTrainedTokenizerFast, *parts: Any) -> str:
    """The text of a row of these parts."""
    row = [int(token) for part in parts for token in part]
    return str(tokenizer.decode(row, clean_up_tokenization_spaces=False))


def sampled(tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> list[int]:
    """Tokens of ``text`` as a model may sample them: seldom those that the tokenizer would choose."""
    draws, found, place = random.Random(seed), [], 0
    names = [m.span() for m in re.finditer("|".join(map(re.escape, tokenizer.get_added_vocab())), text)]
    while place < len(text):
        step = place + draws.randint(1, 4)
        step = next((end for start, end in names if start < step and end > place and start <= place), step)
        step = next((start for start, _ in names if place < start < step), step)
        found += tokenizer(text[place:step], add_special_tokens=False).input_ids
        place = step
    return found
