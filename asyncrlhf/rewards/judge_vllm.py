"""A judge under vLLM, in the reward worker's process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, cast

import torch

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.functions import late
from asyncrlhf.rewards.model_thread import SETTING, ModelThread
from asyncrlhf.rewards.service_config import JudgeConfig

CPU_CACHE_GB = 1.0


class Stepped(Protocol):
    """What is used of vLLM's ``LLMEngine``, whose requests advance by a token a step."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any: ...

    def step(self) -> Sequence[Any]: ...

    def abort_request(self, request_ids: list[str]) -> None: ...


class Asker:
    """Puts prompts to an engine, and takes back those that are not answered in time.

    ``thread`` says how long all prompts of a call may take, and how long one step. ``clock`` gives seconds.
    """

    def __init__(
        self, engine: Stepped, params: Any, thread: ModelThread, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._params = params
        self._thread = thread
        self._clock = clock
        self._names = count()
        self._under_way: dict[str, int] = {}

    def answers(self, prompts: Mapping[int, Any]) -> dict[int, str]:
        """The answers by the prompts' numbers, without those that took longer. Raises StuckError when a step hangs."""
        answers: dict[int, str] = {}
        begun = self._clock()
        self._thread.call("The judge's start", lambda: self._begin(prompts))
        while self._under_way and (self._thread.seconds is None or self._clock() - begun < self._thread.seconds):
            for output in self._thread.call("A step of the judge", self._engine.step):
                if output.finished and output.request_id in self._under_way:
                    answers[self._under_way.pop(output.request_id)] = output.outputs[0].text
        if self._under_way:
            self._thread.call("The judge's end", self._abandon)
        return answers

    def _begin(self, prompts: Mapping[int, Any]) -> None:
        self._abandon()  # what a call that hung left behind
        for number, prompt in prompts.items():
            name = str(next(self._names))
            self._engine.add_request(name, prompt, self._params)
            self._under_way[name] = number

    def _abandon(self) -> None:
        self._engine.abort_request(list(self._under_way))
        self._under_way.clear()


class VllmChat:
    """Answers all questions of a call in one batch. Raises ConfigError where vLLM is missing or refuses the model.

    vLLM starts and runs in ``thread``, whose limit holds for all questions of a call. More than one GPU
    (``tensor_parallel_size``) was never run in this project's tests.
    """

    def __init__(self, config: JudgeConfig, key: str, gpus: float, thread: ModelThread | None = None) -> None:
        thread = thread if thread is not None else ModelThread()
        self._thread = thread
        self._llm = thread.call_without_limit(lambda: start(config, key, gpus))
        self._context = int(self._llm.llm_engine.model_config.max_model_len)
        self._max_tokens = config.max_tokens
        self._tokenizer = cast(Any, self._llm.get_tokenizer())
        self._chat = config.chat_template
        if self._chat and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{key}.judge.model={config.model} has no chat template; allowed: {key}.judge.chat_template=false."
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._asker = Asker(self._llm.llm_engine, params, thread)

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        """A question fails alone that leaves no room for ``max_tokens`` of answer in the context, and one whose answer
        is not there when the call's time is over."""
        from vllm.inputs import tokens_input

        encoded = [self._encode(question) for question in questions]
        fitting = {i: ids for i, ids in enumerate(encoded) if len(ids) + self._max_tokens <= self._context}
        answers = self._asker.answers({i: tokens_input(ids) for i, ids in fitting.items()})
        results: list[str | RewardError] = []
        for i, ids in enumerate(encoded):
            if i in answers:
                results.append(answers[i])
            elif i in fitting:
                results.append(RewardError(late("The judge's answer", cast(float, self._thread.seconds), SETTING)))
            else:
                results.append(
                    RewardError(
                        f"The judge's question has {len(ids)} tokens, which with an answer of {self._max_tokens} "
                        f"do not fit its context of {self._context}."
                    )
                )
        return results

    def _encode(self, question: str) -> list[int]:
        if not self._chat:
            return list(self._tokenizer(question).input_ids)
        turn = [{"role": "user", "content": question}]
        rendered = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._thread.close()


def start(config: JudgeConfig, key: str, gpus: float) -> Any:
    """A vLLM ``LLM`` that has answered once: its first answer compiles, which is in no question's time."""
    _prepare_environment()
    set_threads = torch.set_num_threads
    try:
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
    except ImportError as error:
        raise ConfigError(f"{key}.judge.engine=vllm needs vLLM, whose import fails here: {error}.") from error
    try:
        llm = LLM(**engine_arguments(config, gpus))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"{key}.judge.model={config.model} could not be started under vLLM: {reason}.") from error
    finally:
        torch.set_num_threads = set_threads  # vLLM's CPU worker replaces it for the whole process
    llm.generate([TokensPrompt(prompt_token_ids=[0])], SamplingParams(max_tokens=2), use_tqdm=False)
    return llm


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
