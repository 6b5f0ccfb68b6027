"""The parts of a GRPO script as TRL's documentation writes them: a dataset of conversations with ``solution``, and two
reward functions, one of them ``async`` and at times without an opinion. Nothing in here knows asyncrlhf."""

from __future__ import annotations

import asyncio

from datasets import Dataset


def build_dataset() -> Dataset:
    """GSM8K's shape: a question, and an answer that ends in ``#### NUMBER``."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    raw = Dataset.from_list([{"question": f"{a}+{b}=", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in sums])

    def make_conversation(example):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "solution": example["answer"].split("####")[1].strip(),
            "level": len(example["answer"]),
        }

    return raw.map(make_conversation, remove_columns=["question", "answer"])


def accuracy_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = [1.0 if content.strip() == answer else 0.0 for content, answer in zip(contents, solution, strict=True)]
    if log_extra:
        log_extra("golden_answer", list(solution))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


async def brevity_reward(prompts, completions, completion_ids, level, trainer_state, **kwargs):
    """No opinion of sums with a one-digit answer; of the others, how short the completion is."""

    async def judge(prompt, completion, ids):
        await asyncio.sleep(0)
        assert prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant" and len(ids) > 0
        return -0.1 * len(completion[0]["content"])

    scores = await asyncio.gather(
        *(judge(p, c, ids) for p, c, ids in zip(prompts, completions, completion_ids, strict=True))
    )
    assert trainer_state.global_step >= 0
    return [None if size < 13 else score for size, score in zip(level, scores, strict=True)]
