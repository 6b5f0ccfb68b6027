"""Rollouts and tiny reward models for the tests of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from asyncrlhf.types import Prompt, Rollout


def rollout(
    rollout_id: int,
    text: str,
    *,
    length: int = 3,
    finish: Any = "stop",
    answer: str | None = "a",
    prompt: str | None = None,
    prompt_ids: Sequence[int] = (1,),
    ids: Sequence[int] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Rollout:
    response = np.asarray(np.arange(length) if ids is None else ids, dtype=np.int64)
    about = {"number": rollout_id} if metadata is None else metadata
    return Rollout(
        rollout_id=rollout_id,
        group_id=0,
        prompt=Prompt(
            "p",
            prompt if prompt is not None else f"prompt {rollout_id}",
            np.asarray(prompt_ids, dtype=np.int64),
            answer=answer,
            metadata=about,
        ),
        response_ids=response,
        behavior_logprobs=np.zeros(len(response), dtype=np.float32),
        policy_versions=np.zeros(len(response), dtype=np.int64),
        finish_reason=finish,
        response_text=text,
        generator_id="g",
    )


def save_reward_model(folder: Path, vocabulary: int, seed: int = 0, labels: int = 1, context: int = 64) -> Path:
    """A random Llama for sequence classification whose weights are large enough that every token matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        num_labels=labels,
        pad_token_id=2,
        eos_token_id=2,  # the end token serves as padding too, as in many a real checkpoint
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder
