"""Scores from a generative judge, behind an endpoint or under vLLM in the reward worker's process.

It gets one question per rollout, and a number is read from its answer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.endpoint import Endpoint
from asyncrlhf.rewards.model_thread import SETTING, ModelThread
from asyncrlhf.rewards.reward import RewardSource, Score, ServiceError, late
from asyncrlhf.rewards.reward_config import HttpConfig, JudgeConfig
from asyncrlhf.types import Rollout

PR_SET_PDEATHSIG = 1  # of prctl(2)
QUESTIONS_AT_ONCE = 8  # of an endpoint, by one worker; more load comes from reward.workers
SHOWN = 120  # characters of an answer in a message


class JudgeSource(RewardSource):
    """A generative model that scores rollouts."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern)

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        """One text or failure per question, in order."""
        raise NotImplementedError

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        answers = self.answers([self.question(rollout) for rollout in rollouts])
        services = [a for a in answers if isinstance(a, ServiceError)]
        if answers and len(services) == len(answers):
            raise services[0]
        return [a if isinstance(a, RewardError) else self.read(a) for a in answers]

    def question(self, rollout: Rollout) -> str:
        return self._config.template.format(
            prompt=rollout.prompt.text, response=rollout.response_text, answer=rollout.prompt.answer or ""
        )

    def read(self, answer: str) -> Score:
        """The last match of the pattern: a judge that reasons first names other numbers before it."""
        found = self._pattern.findall(answer)
        if not found:
            return RewardError(f"The judge's answer holds no score ({answer[-SHOWN:]!r}).")
        try:
            score = float(found[-1])
        except ValueError:
            return RewardError(f"The judge's score {found[-1][:SHOWN]!r} is not a number.")
        if not self._config.low <= score <= self._config.high:
            return RewardError(
                f"The judge's score {score:g} lies outside {self._config.low:g} to {self._config.high:g}."
            )
        return score


class ChatEndpoint(JudgeSource):
    """A server that speaks OpenAI's ``/chat/completions``, such as ``vllm serve``."""

    def __init__(self, config: JudgeConfig, http: HttpConfig, timeout_seconds: float) -> None:
        super().__init__(config)
        self._endpoint = Endpoint(http, timeout_seconds, path="/chat/completions")
        self._pool = ThreadPoolExecutor(QUESTIONS_AT_ONCE, thread_name_prefix="judge")

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        return list(self._pool.map(self._answer, questions))

    def _answer(self, question: str) -> str | RewardError:
        document = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._config.max_tokens,
            "temperature": 0.0,
        }
        try:
            answer: str = self._endpoint.ask(document, self._text)
        except RewardError as error:
            return error
        return answer

    def _text(self, answer: Any) -> str:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{self._endpoint.who} answered no choices[0].message.content.") from error
        if not isinstance(text, str):
            raise RewardError(f"{self._endpoint.who} answered {type(text).__name__} instead of the judge's text.")
        return text

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read by torch when a process imports it
CPU_CACHE_GB = 1.0


class Asker:
    """Sends prompts to vLLM's ``LLMEngine``, and aborts those that are not answered in time.

    ``thread`` has the limits of all prompts of a call, and of one step. ``clock`` gives seconds.
    """

    def __init__(
        self, engine: Any, params: Any, thread: ModelThread, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._params = params
        self._thread = thread
        self._clock = clock
        self._names = count()
        self._under_way: dict[str, int] = {}

    def answers(self, prompts: Mapping[int, Any]) -> dict[int, str]:
        """The answers by the prompts' numbers, without late ones. Raises StuckError when a step hangs."""
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
        self._abandon()  # left by a call that hung
        for number, prompt in prompts.items():
            name = str(next(self._names))
            self._engine.add_request(name, prompt, self._params)
            self._under_way[name] = number

    def _abandon(self) -> None:
        self._engine.abort_request(list(self._under_way))
        self._under_way.clear()


class VllmChat(JudgeSource):
    """Answers all questions of a call in one batch. Raises ConfigError if vLLM is missing or refuses the model.

    vLLM starts and runs in ``thread``, whose limit applies to all questions of a call.
    """

    def __init__(self, config: JudgeConfig, key: str, gpus: float, thread: ModelThread | None = None) -> None:
        super().__init__(config)
        self._thread = thread = thread if thread is not None else ModelThread()
        self._llm = thread.call_without_limit(lambda: start(config, key, gpus))
        self._context = int(self._llm.llm_engine.model_config.max_model_len)
        self._tokenizer = cast(Any, self._llm.get_tokenizer())
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
        self._asker = Asker(self._llm.llm_engine, params, thread)

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        """A question fails alone if it leaves no room for ``max_tokens`` of answer in the context, or if its answer
        is late."""
        from vllm.inputs import tokens_input

        encoded = [self._encode(question) for question in questions]
        fitting = {i: ids for i, ids in enumerate(encoded) if len(ids) + self._config.max_tokens <= self._context}
        answers = self._asker.answers({i: tokens_input(ids) for i, ids in fitting.items()})

        def failure(i: int) -> RewardError:
            if i in fitting:
                return RewardError(late("The judge's answer", cast(float, self._thread.seconds), SETTING))
            return RewardError(
                f"The judge's question has {len(encoded[i])} tokens, which with an answer of "
                f"{self._config.max_tokens} do not fit its context of {self._context}."
            )

        return [answers[i] if i in answers else failure(i) for i in range(len(encoded))]

    def _encode(self, question: str) -> list[int]:
        if not self._tokenizer.chat_template:  # a base model
            return list(self._tokenizer(question).input_ids)
        turn = [{"role": "user", "content": question}]
        rendered = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False).input_ids)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._thread.close()


def start(config: JudgeConfig, key: str, gpus: float) -> Any:
    """A vLLM ``LLM`` that has answered once: its first answer compiles, which must not count against a question."""
    with starting_vllm(f"{key}.judge.engine=vllm", 1):
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt

        try:
            llm = LLM(**engine_arguments(config, gpus))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(f"{key}.judge.model={config.model} could not be started under vLLM: {reason}.") from error
    llm.generate([TokensPrompt(prompt_token_ids=[0])], SamplingParams(max_tokens=2), use_tqdm=False)
    return llm


def engine_arguments(config: JudgeConfig, gpus: float) -> dict[str, Any]:
    """The keywords of vLLM's ``LLM``."""
    on_cpu = gpus == 0
    arguments: dict[str, Any] = {
        "model": config.model,
        "load_format": "safetensors",
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "max_model_len": config.max_length or None,
        "enforce_eager": on_cpu,  # compiling takes minutes on a CPU
        "distributed_executor_backend": "uni",  # a judge on several GPUs is a server of its own
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_GB * 2**30
    return arguments


def end_with_parent(worker: Any) -> None:
    """Runs in a vLLM worker: if that is a separate process, the kernel kills it when the thread that started it
    ends. vLLM's own watch is a thread of the worker, which does not run if the worker hangs or is frozen."""
    if sys.platform == "linux" and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def starting_vllm(setting: str, workers: int = 1) -> Iterator[None]:
    """For the import and the start of vLLM in this process, which belongs to the caller or is a test's. Several
    ``workers``, each a process that computes on this machine's cores, share the threads of this process. Raises
    ConfigError, with the ``setting`` that needs vLLM, if its import fails."""
    # vLLM reads these when it is imported or started.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or a CPU worker would get a separate process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM would bind each CPU worker to its own NUMA node; the cores are shared with the learner here.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    threads, set_threads = {name: os.environ.get(name) for name in THREADS}, torch.set_num_threads
    if workers > 1:
        # As many threads in each worker as here would wait for each other's cores at the end of every operation.
        os.environ |= dict.fromkeys(THREADS, str(max(1, torch.get_num_threads() // workers)))
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{setting} needs vLLM, whose import fails here: {error}.") from error
    finally:
        torch.set_num_threads = set_threads  # vLLM's CPU worker replaces it for the whole process
        for name, before in threads.items() if workers > 1 else ():
            del os.environ[name]
            os.environ |= {} if before is None else {name: before}
