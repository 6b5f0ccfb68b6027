"""A reward model is trained on the very ids that a reward worker hands it of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.rewards.model import policy_ids
from asyncrlhf.stages.preference_data import PairEncoder, choose_padding
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Rollout

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerFast:
    """Characters with one merge, a ChatML template, and the end token as padding, as SmolLM2-Instruct has it."""
    letters = [*"abcdefghijklmnopqrstuvwxyz +=0123456789.?", "\n", "ab"]
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<unk>": len(letters)}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHATML,
    )


def rollout_ids(tokenizer: Any, text: str, response: str, **task: Any) -> list[int]:
    """Through the task's own encoder and the reward worker's: prompt, sampled tokens, end token."""
    prompt = PromptEncoder(tokenizer, TaskConfig(**task))("id", text)
    ids = np.array([*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id])
    zeros = np.zeros(len(ids))
    return policy_ids(
        Rollout(0, 0, prompt, ids, zeros.astype(np.float32), zeros.astype(np.int64), "stop", response, "g")
    ).tolist()


def test_plain_texts_are_what_the_policy_sees() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    encode = PairEncoder(tokenizer)
    wanted = rollout_ids(tokenizer, "12+30=", "42")
    assert wanted[0] == tokenizer.bos_token_id and wanted[-1] == tokenizer.eos_token_id
    row = {"prompt": "12+30=", "chosen": "42", "rejected": "7<eos>"}
    assert encode(row) == {"chosen_ids": wanted, "rejected_ids": rollout_ids(tokenizer, "12+30=", "7")}
    assert encode.encode(None, "12+30=42") == wanted
    assert encode.encode("", "12+30=42<eos>") == wanted
    cut = encode.encode("1+1=", "2<eos>3")
    assert cut[-3:] == [tokenizer.eos_token_id, *tokenizer("3", add_special_tokens=False).input_ids, cut[-1]]


@pytest.mark.parametrize("system", ["", "be brief."])
def test_conversations_end_with_the_end_token(chat: PreTrainedTokenizerFast, system: str) -> None:
    """ChatML writes a line break behind the end token, which no policy samples."""
    encode = PairEncoder(chat)
    first = [{"role": "system", "content": system}] if system else []
    prompt = [*first, {"role": "user", "content": "what is 1+1?"}]
    answer = [{"role": "assistant", "content": "it is 2."}]
    wanted = rollout_ids(chat, "what is 1+1?", "it is 2.", chat_template=True, system_prompt=system)
    assert encode.encode(prompt, answer) == wanted
    assert encode.encode(None, [*prompt, *answer]) == wanted
    whole = chat(chat.apply_chat_template([*prompt, *answer], tokenize=False)).input_ids
    assert whole[: len(wanted)] == wanted and len(whole) == len(wanted) + 1


def test_an_end_token_inside_the_answer_is_kept(chat: PreTrainedTokenizerFast) -> None:
    """An answer of several turns is cut behind its last end token, not its first."""
    answer = [
        {"role": "assistant", "content": "one."},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "two."},
    ]
    ids = PairEncoder(chat).encode([{"role": "user", "content": "count"}], answer)
    assert ids.count(chat.eos_token_id) == 4 and ids[-1] == chat.eos_token_id
    assert chat.decode(ids).replace(" ", "").endswith("two.<|im_end|>")


def test_no_token_spans_the_border(chat: PreTrainedTokenizerFast) -> None:
    """The policy saw the prompt alone: "a" and "b" stay two tokens though the text "ab" is one."""
    ids = PairEncoder(chat).encode("x a", "b c")
    assert ids == rollout_ids(chat, "x a", "b c")
    joint = chat("x ab c").input_ids
    assert len(ids) == len(joint) + 2 and ids[: len(joint)] != joint


def test_padding_is_not_the_end_token(chat: PreTrainedTokenizerFast) -> None:
    import copy

    own = copy.deepcopy(chat)
    choose_padding(own)
    assert own.pad_token == "<unk>" and own.pad_token_id != own.eos_token_id
    # The same tokens as the policy's tokenizer: a reward worker then hands the policy's ids on.
    assert own.get_vocab() == chat.get_vocab() and own.all_special_ids == chat.all_special_ids
    tiny = load_tokenizer(ModelConfig())
    choose_padding(tiny)
    assert tiny.pad_token == "<pad>"
