"""One episode with turns that the test writes, in place of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.driver import Driver
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.world import World
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import GenerationRequest, Rollout, SamplingParams
from tests.calling_model import calling_tokenizer

CONTEXT = 20_000
END = "<|im_end|>"


def play(turns: Sequence[str], row: Mapping[str, Any] | None = None, inline: bool = False, **settings: Any) -> Rollout:
    """The rollout of an episode under ``settings``, those of ``episode``, in which the model says ``turns``, and then
    the last of them again and again. Raises EpisodeError if there is none."""
    tokenizer = calling_tokenizer([])
    encoder = PromptEncoder(tokenizer, TaskConfig(max_prompt_length=CONTEXT))
    config = EpisodeConfig(**settings)
    driver = Driver(config, World(config, inline), Conversation(tokenizer), encoder, CONTEXT)
    prompt = encoder("p", [{"role": "user", "content": "Begin. "}], metadata=row)
    request = GenerationRequest(1, 0, prompt, 7, SamplingParams(CONTEXT))
    left = list(turns)

    async def sample(asked: GenerationRequest) -> Rollout:
        text = left.pop(0) if len(left) > 1 else left[0]
        ids = np.array(tokenizer(text + END).input_ids)
        zeros = np.zeros(len(ids), np.float32)
        return Rollout(1, 0, asked.prompt, ids, zeros, zeros.astype(np.int64), "stop", text, tag=asked.tag)

    try:
        return asyncio.run(driver.play(request, sample))
    finally:
        driver.close()


def said(rollout: Rollout) -> list[tuple[str, str]]:
    """Who said what after the prompt."""
    return [(message["role"], message["content"]) for message in rollout.messages]
