"""Builds the scorer of ``reward.*``, and finds its errors before any actor starts."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import transformers

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.model_thread import ModelThread
from asyncrlhf.rewards.reward import (
    EnvironmentSource,
    FunctionSource,
    LengthSource,
    RewardSource,
    Scorer,
    WeightedSource,
    task_reward,
)
from asyncrlhf.rewards.reward_config import RewardConfig, RewardPart
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Prompt, Rollout


def build_scorer(
    config: RewardConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    task: Callable[[], Task],
    max_completion_length: int,
    only: Collection[str] | None = None,
) -> Scorer:
    """Loads every part, or those in ``only``; raises ConfigError if one cannot be loaded. ``close()`` closes the
    parts' resources. ``tokenizer`` is the policy's; ``task`` is needed only by a part that is the task's rule."""
    thread = ModelThread(config.model_timeout_seconds)  # of all models, started with the first
    sources: dict[str, WeightedSource] = {}
    scorer = Scorer(sources, config, max_completion_length)
    try:
        for name, part in config.sources.items():
            if only is None or name in only:
                source = _build(part, config.key(name), config, tokenizer, task, thread)
                sources[name] = WeightedSource(source, part.weight)
    except ConfigError:
        scorer.close()
        thread.close()
        raise
    return scorer


def check_rewards(
    config: RewardConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    task: Callable[[], Task],
    max_completion_length: int,
    prompt: Prompt,
    *,
    episodes: bool = False,
) -> None:
    """Raise ConfigError for rewards that cannot be computed. Parts that start cheaply score a first probe; for
    models and judges that a worker will load, only the config and the tokenizer are checked. With ``episodes`` a user's
    function is only loaded: it may ask for the messages of tools, or for environments, which no probe has."""
    light = [name for name, part in config.sources.items() if not _is_heavy(part)]
    for name, part in config.sources.items():
        if name not in light:
            _check_heavy(part, config.key(name), tokenizer)
    scorer = build_scorer(config, tokenizer, task, max_completion_length, light)
    try:
        for name in [name for name in light if episodes and config.sources[name].kind == "python"]:
            scorer.sources.pop(name).source.close()
        if scorer.sources:
            preflight(scorer, prompt)
    finally:
        scorer.close()


def _build(
    part: RewardPart,
    key: str,
    config: RewardConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    task: Callable[[], Task],
    thread: ModelThread,
) -> RewardSource:
    """Each kind imports its packages here: requests and transformers' classifiers are slow to import."""
    if part.kind == "task":
        return FunctionSource(task_reward(task()), config.timeout_seconds)
    if part.kind == "length":
        return LengthSource()
    if part.kind == "environment":
        return EnvironmentSource()
    if part.kind == "python":
        from asyncrlhf.rewards.sandbox import SandboxSource

        named = "reward.reward_funcs" if config.reward_funcs else f"{key}.target"
        return SandboxSource(part.target, named, config.timeout_seconds, config.sandbox)
    if part.kind == "http":
        from asyncrlhf.rewards.endpoint import HttpSource

        return HttpSource(part.http, config.timeout_seconds)
    if part.kind == "model":
        from asyncrlhf.rewards.model import ModelSource

        budget, device = config.max_batch_tokens, "cuda" if config.gpus > 0 else "cpu"
        return ModelSource(part.model, key, tokenizer, max_batch_tokens=budget, device=device, thread=thread)
    from asyncrlhf.rewards.judge import ChatEndpoint, VllmChat

    if part.judge.engine == "http":
        return ChatEndpoint(part.judge, part.http, config.timeout_seconds)
    return VllmChat(part.judge, key, config.gpus, thread)


def _is_heavy(part: RewardPart) -> bool:
    return part.kind == "model" or (part.kind == "judge" and part.judge.engine == "vllm")


def _check_heavy(part: RewardPart, key: str, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    if part.kind == "model":
        from asyncrlhf.rewards.model import build_encoder, check_reward_model

        check_reward_model(part.model, key)
        build_encoder(part.model, key, tokenizer)
        return
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigError(f"{key}.judge.engine=vllm needs vLLM, which is not installed; allowed here: http.")


def preflight(scorer: Scorer, prompt: Prompt) -> None:
    """Score a probe twice in one call, the reference answer or else the prompt's own text; ConfigError without a
    score."""
    ids, text = prompt.token_ids, prompt.answer or prompt.text
    logprobs, versions = np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int64)
    probes = [Rollout(-i, -1, prompt, ids, logprobs, versions, "stop", text, "preflight") for i in (1, 2)]
    try:
        result = scorer.score(probes)[0]
    except RewardError as error:
        raise ConfigError(f"{scorer.source} gives no score for a first probe: {error}") from error
    if result.error is not None and not result.abstained:
        raise ConfigError(f"{scorer.source} gives no score for a first probe: {result.error.rstrip('.')}.")
