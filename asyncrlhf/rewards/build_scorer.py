"""Builds the scorer that ``reward.*`` asks for, and finds what is wrong with it before any actor starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.functions import FunctionSource, LengthSource, task_reward
from asyncrlhf.rewards.model_thread import ModelThread
from asyncrlhf.rewards.reward import RewardSource
from asyncrlhf.rewards.reward_config import RewardConfig, RewardPart
from asyncrlhf.rewards.scorer import Scorer, WeightedSource
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Prompt, Rollout


@dataclass(frozen=True)
class Surroundings:
    """What sources need beside their settings. ``task`` is asked for only by a part that is the task's rule."""

    config: RewardConfig
    tokenizer: PreTrainedTokenizerBase  # the policy's
    task: Callable[[], Task]
    thread: ModelThread  # of all models, started with the first

    @property
    def device(self) -> str:
        return "cuda" if self.config.gpus > 0 else "cpu"


def build_scorer(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Callable[[], Task],
    max_completion_length: int,
) -> Scorer:
    """Loads every part; raises ConfigError for one that cannot be. ``close()`` ends what the parts hold open."""
    around = Surroundings(config, tokenizer, task, ModelThread(config.model_timeout_seconds))
    return _assemble(config, config.sources, around, max_completion_length)


def check_rewards(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Callable[[], Task],
    max_completion_length: int,
    prompt: Prompt,
) -> None:
    """Raise ConfigError for rewards that cannot be given. Parts that cost little to start score a first probe; of
    models and judges that a worker will load, only the config and the tokenizer are looked at."""
    around = Surroundings(config, tokenizer, task, ModelThread(config.model_timeout_seconds))
    light = {name: part for name, part in config.sources.items() if not _is_heavy(part)}
    for name, part in config.sources.items():
        if name not in light:
            _check_heavy(part, config.key(name), tokenizer)
    scorer = _assemble(config, light, around, max_completion_length)
    try:
        if light:
            preflight(scorer, prompt)
    finally:
        scorer.close()


def _assemble(
    config: RewardConfig, parts: dict[str, RewardPart], around: Surroundings, max_completion_length: int
) -> Scorer:
    sources: dict[str, WeightedSource] = {}
    scorer = Scorer(sources, config, max_completion_length)
    try:
        for name, part in parts.items():
            sources[name] = WeightedSource(BUILDERS[part.kind](part, config.key(name), around), part.weight)
    except ConfigError:
        scorer.close()
        around.thread.close()
        raise
    return scorer


def _task(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    return FunctionSource(task_reward(around.task()), around.config.timeout_seconds)


def _length(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    return LengthSource()


def _python(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    from asyncrlhf.rewards.sandbox import SandboxSource

    return SandboxSource(part.target, f"{key}.target", around.config.timeout_seconds)


def _model(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    from asyncrlhf.rewards.model import ModelSource

    budget = around.config.max_batch_tokens
    return ModelSource(
        part.model, key, around.tokenizer, max_batch_tokens=budget, device=around.device, thread=around.thread
    )


def _judge(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    from asyncrlhf.rewards.judge import ChatEndpoint, JudgeSource

    if part.judge.engine == "http":
        return JudgeSource(part.judge, ChatEndpoint(part.judge, part.http, around.config.timeout_seconds))
    from asyncrlhf.rewards.judge_vllm import VllmChat

    return JudgeSource(part.judge, VllmChat(part.judge, key, around.config.gpus, around.thread))


def _http(part: RewardPart, key: str, around: Surroundings) -> RewardSource:
    from asyncrlhf.rewards.endpoint import HttpSource

    return HttpSource(part.http, around.config.timeout_seconds)


# What each kind needs is imported where it is built: requests and transformers' classifiers take a while.
BUILDERS: dict[str, Callable[[RewardPart, str, Surroundings], RewardSource]] = {
    "task": _task,
    "python": _python,
    "model": _model,
    "judge": _judge,
    "http": _http,
    "length": _length,
}


def _is_heavy(part: RewardPart) -> bool:
    return part.kind == "model" or (part.kind == "judge" and part.judge.engine == "vllm")


def _check_heavy(part: RewardPart, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if part.kind == "model":
        from asyncrlhf.rewards.model_loading import build_encoder, check_reward_model

        check_reward_model(part.model, key)
        build_encoder(part.model, key, tokenizer)
        return
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigError(f"{key}.judge.engine=vllm needs vLLM, which is not installed; allowed here: http.")


def preflight(scorer: Scorer, prompt: Prompt) -> None:
    """Score one probe, the reference answer or else the prompt's own text; ConfigError if that gives no score."""
    probe = Rollout(
        rollout_id=-1,
        group_id=-1,
        prompt=prompt,
        response_ids=prompt.token_ids,
        behavior_logprobs=np.zeros(len(prompt.token_ids), dtype=np.float32),
        policy_versions=np.zeros(len(prompt.token_ids), dtype=np.int64),
        finish_reason="stop",
        response_text=prompt.answer or prompt.text,
        generator_id="preflight",
    )
    (result,) = scorer.score([probe])
    if result.error is not None:
        raise ConfigError(f"{scorer.source} gives no score for a first probe: {result.error}")
