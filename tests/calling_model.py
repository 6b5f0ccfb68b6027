"""A small random model that calls tools: whole calls are single tokens of its vocabulary, most of which are calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrlhf.models.checkpoint_folder import resolve

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
LETTERS = [chr(number) for number in range(32, 127)] + ["\n"]

# Texts of the template and of schemas as one token each, so that prompts are short.
LONG = [
    *re.findall(r"[A-Za-z][A-Za-z ,.]{14,}", TEMPLATE.read_text()),
    '{"type": "function", "function": {"name": ', '"description": "',
    '"parameters": {"type": "object", "properties": {',
    '"required": [', '"return": {"type": "', '{"type": "integer", ',
]  # fmt: skip


def call_text(name: str, arguments: str) -> str:
    """A call as the chat template writes it; ``arguments`` in JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calling_tokenizer(calls: Sequence[str]) -> PreTrainedTokenizerFast:
    """Letters, and each of ``calls`` as a token; Qwen3's chat template."""
    control = ["<|im_start|>", "<|im_end|>"]
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(["<unk>", *LETTERS])}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(name, special=True) for name in control])
    inner.add_tokens([AddedToken(text, special=False) for text in [*calls, *marks, *LONG]])
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **ends, chat_template=TEMPLATE.read_text())


def calling_model(folder: Path, calls: Sequence[str]) -> Path:
    """Write the checkpoint, with the shape of the tiny model."""
    tokenizer = calling_tokenizer(calls)
    shape = AutoConfig.from_pretrained(resolve("tiny"))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    shape.update({"vocab_size": len(tokenizer), "max_position_embeddings": 4096, **ends})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
