"""A judge under vLLM, in the reward worker's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.service_config import JudgeConfig

CPU_CACHE_GB = 1.0


class VllmChat:
    """Answers all questions of a call in one batch. Raises ConfigError where vLLM is missing or refuses the model.

    More than one GPU (``tensor_parallel_size``) was never run in this project's tests.
    """

    def __init__(self, config: JudgeConfig, key: str, gpus: float) -> None:
        _prepare_environment()
        set_threads = torch.set_num_threads
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ConfigError(f"{key}.judge.engine=vllm needs vLLM, whose import fails here: {error}.") from error
        try:
            self._llm = LLM(**engine_arguments(config, gpus))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(f"{key}.judge.model={config.model} could not be started under vLLM: {reason}.") from error
        finally:
            torch.set_num_threads = set_threads  # vLLM's CPU worker replaces it for the whole process
        self._context = int(self._llm.llm_engine.model_config.max_model_len)
        self._params = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
        self._max_tokens = config.max_tokens
        self._tokenizer = cast(Any, self._llm.get_tokenizer())
        self._chat = config.chat_template
        if self._chat and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{key}.judge.model={config.model} has no chat template; allowed: {key}.judge.chat_template=false."
            )

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        """A question that leaves no room for ``max_tokens`` of answer in the context fails alone."""
        from vllm.inputs import tokens_input

        encoded = [self._encode(question) for question in questions]
        results: list[str | RewardError] = [
            RewardError(
                f"The judge's question has {len(ids)} tokens, which with an answer of {self._max_tokens} "
                f"do not fit its context of {self._context}."
            )
            for ids in encoded
        ]
        fitting = [i for i, ids in enumerate(encoded) if len(ids) + self._max_tokens <= self._context]
        prompts: list[Any] = [tokens_input(encoded[i]) for i in fitting]
        for i, output in zip(fitting, self._llm.generate(prompts, self._params, use_tqdm=False), strict=True):
            results[i] = output.outputs[0].text
        return results

    def _encode(self, question: str) -> list[int]:
        if not self._chat:
            return list(self._tokenizer(question).input_ids)
        turn = [{"role": "user", "content": question}]
        rendered = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def engine_arguments(config: JudgeConfig, gpus: float) -> dict[str, Any]:
    """The keywords of vLLM's ``LLM``."""
    on_cpu = gpus == 0
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "max_model_len": config.max_length or None,
        "enforce_eager": on_cpu,  # compiling takes minutes on a CPU
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
    }
    if config.kv_cache_gb or on_cpu:
        arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gb or CPU_CACHE_GB) * 2**30)
    return arguments


def _prepare_environment() -> None:
    """vLLM reads these when it is imported or started; this process belongs to the worker, or is a test's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM would bind its CPU worker to a NUMA node of its own; the cores are shared with the learner here.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
