"""A tiny model under vLLM for tests: one start a module serves many engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrlhf.data.data_config import LoraConfig, ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm.core import VllmCore
from asyncrlhf.engines.vllm.vllm_engine import VllmEngine
from asyncrlhf.types import FloatArray, GenerationRequest, IntArray, Prompt, Rollout, SamplingParams

VOCABULARY = 24
MOST_SLOTS = 8
PROBE = [np.random.default_rng(seed).integers(0, VOCABULARY, 40) for seed in range(5)]

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def tiny_model(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """Heads of 32 elements, the smallest that vLLM's CPU attention has; weights large enough that text matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


class TinyVllm:
    """A running vLLM, handed to one engine after the other. An engine that was not closed is emptied by the next."""

    def __init__(
        self, folder: Path, *, tied: bool = False, lora: LoraConfig | None = None, sampled: int | None = None
    ) -> None:
        """``lora``: an adapter that vLLM itself applies. ``sampled``: ids from this one on have no probability."""
        self.model = tiny_model(tied=tied)
        self.model.save_pretrained(folder)
        own = VllmConfig(
            engine_kwargs={"block_size": 32, "max_num_batched_tokens": 512},
            kv_cache_gb=0.05,
            max_model_len=128,
            enable_lora=lora is not None,
        )
        settings = GeneratorConfig(engine="vllm", slots=MOST_SLOTS, vllm=own)
        self.core = VllmCore(settings, ModelConfig(path=str(folder), lora=lora or LoraConfig()), sampled=sampled)
        self._end, self.core.close = self.core.close, lambda: None  # type: ignore[method-assign]
        self._last: VllmEngine | None = None

    def engine(self, slots: int) -> VllmEngine:
        self.release()
        self._last = VllmEngine(self.core, slots=slots)
        return self._last

    def release(self) -> None:
        if self._last is not None:
            self._last.cancel(self._last.in_flight())
            self._last = None

    def close(self) -> None:
        self.release()
        self._end()


def requests(count: int, longest: int, *, first: int = 0, prompt: int = 5, **sampling: Any) -> list:
    return [
        GenerationRequest(i, i, Prompt("", "", np.random.default_rng(i).integers(0, VOCABULARY, prompt)), 1000 + i,
                          SamplingParams(max_completion_length=longest, **sampling))  # type: ignore[arg-type]
        for i in range(first, first + count)
    ]  # fmt: skip


def own_logprobs(logits: torch.Tensor, text: IntArray) -> FloatArray:
    """[len-1] log-probs of a text's own tokens at temperature 1."""
    found = torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(text)[1:, None])[:, 0]
    return found.numpy()


def finish(engine: VllmEngine) -> dict[int, Rollout]:
    done: dict[int, Rollout] = {}
    while engine.in_flight():
        for result in engine.step(0.0).finished:
            assert isinstance(result, Rollout), result
            done[result.rollout_id] = result
    return done
