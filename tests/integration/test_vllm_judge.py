"""A judge under vLLM: its text is greedy transformers' own, and its score what the pattern finds there."""

from __future__ import annotations

import re
from itertools import chain, repeat
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.judge import VllmChat
from asyncrlhf.rewards.model_thread import ModelThread
from asyncrlhf.rewards.reward_config import JudgeConfig
from tests.unit.rewards.worlds import rollout
from tests.vllm_tiny import needs_vllm

pytestmark = needs_vllm


def test_the_tiny_model_judges_as_transformers_does(tiny_model_path: Path) -> None:
    """The arithmetic model as judge: asked for a sum it answers a number, which the pattern reads."""
    config = JudgeConfig(
        model=str(tiny_model_path), template="{response}", pattern=r"^\s*(\d+)", high=1e6, max_tokens=8,
    )  # fmt: skip
    questions = ["12+34=", "7+5=", "98+1=", "="]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path).eval()
    expected = []
    for question in questions:
        ids = torch.tensor([tokenizer(question).input_ids])
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(out, skip_special_tokens=True))
    chat = VllmChat(config, "reward", gpus=0, thread=ModelThread(60))
    try:
        assert chat.answers(questions) == expected
        long = rollout(9, "1+" * 70)
        *scores, late = chat.scores([*(rollout(i, q) for i, q in enumerate(questions)), long])
        for text, score in zip(expected, scores, strict=True):
            found = re.findall(config.pattern, text)
            assert score == float(found[-1]) if found else isinstance(score, RewardError)
        assert isinstance(scores[0], float), "the model knows some sums"
        assert isinstance(late, RewardError) and "do not fit its context of 128" in str(late)
        chat._asker._clock = chain([0, 0], repeat(60)).__next__  # one step fits in: a token of each answer
        for answer in chat.answers(questions):
            assert isinstance(answer, RewardError) and "answer took longer than reward.model_timeout_seconds=60" in str(
                answer
            )
        chat._asker._clock = repeat(0).__next__
        assert chat.answers(questions) == expected, "nothing is left of what was taken back"
    finally:
        chat.close()
