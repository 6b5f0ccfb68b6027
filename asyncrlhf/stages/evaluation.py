"""Evaluates a model on the held-out prompts: reward, win rate, KL and perplexity, with answers side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import ANSWERS
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import check_model, load_sampled
from asyncrlhf.models.vocabulary import end_tokens
from asyncrlhf.orchestrator.rollouts.heldout import pass_at_k
from asyncrlhf.orchestrator.run import Prepared, prepare
from asyncrlhf.rewards.model import same_tokens
from asyncrlhf.stages.answers import Scored, sample_answers, score_answers, written
from asyncrlhf.stages.statistics import figures, kl_figures, perplexity, response_logprobs
from asyncrlhf.tasks.build_task import build_task, evaluation_prompts, evaluation_task
from asyncrlhf.types import Prompt, Rollout, SamplingParams
from asyncrlhf.validation import check


def evaluate(config: RunConfig, every_row: bool = False) -> dict[str, Any]:
    """The content of ``evaluation.json``. Raises ConfigError before anything is sampled. With ``every_row`` the first
    ``task.heldout_size`` rows of the data are answered, instead of those that a training run would hold out.

    Rewards are means over the answers that could be scored, with standard errors over prompts. ``win_rate``: the
    probability that an answer has more reward than the opponent's to the same prompt; ties count half. ``kl``: of the
    policy from ``evaluation.reference`` at the temperature of the answers; None for greedy answers, which are not
    samples. ``sets``: the same for each of ``evaluation.sets``, by name.
    """
    torch.set_num_threads(max(1, config.generator.threads))
    prepared = prepare(config)
    sets = {name: _evaluation_set(prepared, name, given) for name, given in (config.evaluation.sets or {}).items()}
    read: ReadPrompts = evaluation_prompts if every_row else _heldout
    prompts = evaluation_prompts(config.task, prepared.tokenizer) if every_row else prepared.task.heldout()
    result = _evaluate(prepared, prompts, read)
    found = {name: _evaluate(own, prompts, evaluation_prompts) for name, (own, prompts) in sets.items()}
    return {**result, "sets": found} if sets else result


# The prompts of a task, in the tokens of a tokenizer.
ReadPrompts = Callable[[TaskConfig, transformers.PreTrainedTokenizerBase], list[Prompt]]


def _heldout(task: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[Prompt]:
    return build_task(task, tokenizer).heldout()


def _evaluation_set(prepared: Prepared, name: str, given: Mapping[str, Any]) -> tuple[Prepared, list[Prompt]]:
    """Another task with the evaluation's settings, and its prompts."""
    key = f"evaluation.sets.{name}"
    task = evaluation_task(prepared.config.task, given, key)
    try:
        prompts = evaluation_prompts(task, prepared.tokenizer)
    except ConfigError as error:
        raise ConfigError(f"In {key}: {error}") from error
    return replace(prepared, config=replace(prepared.config, task=task)), prompts


def _evaluate(prepared: Prepared, prompts: list[Prompt], read: ReadPrompts) -> dict[str, Any]:
    config, settings = prepared.config, prepared.config.evaluation
    sampling = replace(prepared.sampling, temperature=settings.temperature, top_p=1.0, top_k=0, min_p=0.0)
    opponent = _other_model(config, settings.against, "against") if settings.against not in ("", ANSWERS) else None
    reference = _other_model(config, settings.reference, "reference") if settings.reference else None
    if reference is not None:
        penalty = config.generator.repetition_penalty
        check(penalty == 1, f"evaluation.reference has no KL to answers of generator.repetition_penalty={penalty:g}.")
        check(
            same_tokens(load_tokenizer(reference), prepared.tokenizer),
            f"evaluation.reference={reference.path} has other tokens than model.path={config.model.path}; "
            "allowed: a model with the same tokenizer.",
        )
    if settings.against == ANSWERS:
        check(
            any(prompt.answer for prompt in prompts),
            f"evaluation.against={ANSWERS}, but no held-out prompt of task={config.task.kind} has an answer.",
        )
    answers = sample_answers(config, config.model, prepared.tokenizer, prompts, sampling, settings.num_generations)
    theirs = _opponents(prepared, prompts, read, opponent, sampling)
    scored, scored_theirs = score_answers(config, answers, theirs)
    asked = settings.num_generations * len(prompts)
    result = {
        "model": config.model.path,
        "task": config.task.kind,
        "prompts": len(prompts),
        "answers": asked,
        "temperature": settings.temperature,
        "failed": asked - len(scored),
        **_rewards(scored, answers),
        **_episodes(answers),
        **pass_at(settings.pass_k, settings.pass_reward, scored),
    }
    if settings.against:
        result |= {"against": settings.against, **win_rate(scored, scored_theirs)}
    if reference is not None:
        result |= {"reference": reference.path, **_divergence(config, reference, answers)}
    return {**result, "samples": _samples(scored, scored_theirs, bool(settings.against))}


def _other_model(config: RunConfig, path: str, key: str) -> ModelConfig:
    """A second model, loaded under the settings of ``model``."""
    model = replace(config.model, path=path)
    try:
        check_model(model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", f"evaluation.{key}")) from error
    return model


def _opponents(
    prepared: Prepared,
    prompts: Sequence[Prompt],
    read: ReadPrompts,
    opponent: ModelConfig | None,
    sampling: SamplingParams,
) -> list[Rollout]:
    """The second model's answers, or the task's, in the policy's tokens; empty without an opponent."""
    config, tokenizer = prepared.config, prepared.tokenizer
    each = config.evaluation.num_generations
    if config.evaluation.against == ANSWERS:
        return written([(i, p.answer, True) for i, p in enumerate(prompts) if p.answer], prompts, tokenizer)
    if opponent is None:
        return []
    own: transformers.PreTrainedTokenizerBase = load_tokenizer(opponent)
    sampling = replace(sampling, stop_token_ids=end_tokens(opponent, own) if sampling.stop_token_ids else ())
    if same_tokens(own, tokenizer):
        return sample_answers(config, opponent, tokenizer, prompts, sampling, each)
    asked = read(config.task, own)
    made = sample_answers(config, opponent, own, asked, sampling, each)
    return written([(r.group_id, r.response_text, r.finish_reason == "stop") for r in made], prompts, tokenizer)


def _rewards(scored: Sequence[Scored], answers: Sequence[Rollout]) -> dict[str, Any]:
    groups = [s.rollout.group_id for s in scored]
    parts: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(name for s in scored for name in s.result.parts):
        judged = [s for s in scored if name in s.result.parts]  # a part may give no score for some
        parts[name] = figures("mean", [s.result.parts[name] for s in judged], [s.rollout.group_id for s in judged])
    return {
        **figures("reward_mean", [s.reward for s in scored], groups),
        "reward_parts": parts if parts.keys() != {"score"} else {},
        "response_length_mean": float(np.mean([r.sampled.sum() for r in answers])) if answers else None,
        "truncation_rate": float(np.mean([r.finish_reason == "length" for r in answers])) if answers else None,
    }


def _episodes(answers: Sequence[Rollout]) -> dict[str, float]:
    """Means over episodes, as a run's metrics of these names; empty without any."""
    played = [r.turns for r in answers if r.turns]
    if not played:
        return {}
    return {
        "turns_mean": float(np.mean([len(turns) for turns in played])),
        "tool_calls_mean": float(np.mean([sum(len(turn.tools) for turn in turns) for turns in played])),
        "tool_failures_mean": float(np.mean([sum(turn.failures for turn in turns) for turns in played])),
    }


def pass_at(ks: Sequence[int], least: float, scored: Sequence[Scored]) -> dict[str, float | None]:
    """For each k the probability that one of k answers to a prompt has a reward of at least ``least``, with its
    standard error over prompts. Prompts with fewer than k scored answers are left out."""
    found: dict[str, float | None] = {}
    right = [[s.reward >= least for s in own] for own in _by_prompt(scored).values()]
    for k in ks:
        chances = [pass_at_k(own, k) for own in right if len(own) >= k]
        found |= figures(f"pass_at_{k}", chances)
    return found


def win_rate(ours: Sequence[Scored], theirs: Sequence[Scored]) -> dict[str, Any]:
    """The win rate with its standard error over prompts, the fraction of ties, and the opponent's reward.

    Each answer to a prompt is compared with each of the opponent's to the same prompt. Equal texts are a tie, even if
    their scores differ by rounding in different batches.
    """
    others = _by_prompt(theirs)
    outcomes = {
        group: [_outcome(mine, other) for mine in own for other in others[group]]
        for group, own in _by_prompt(ours).items()
        if group in others
    }
    met = [point for points in outcomes.values() for point in points]
    return {
        **figures("win_rate", [float(np.mean(points)) for points in outcomes.values()]),
        "win_rate_prompts": len(outcomes),
        "tie_rate": float(np.mean([point == 0.5 for point in met])) if met else None,
        **figures("against_reward_mean", [s.reward for s in theirs], [s.rollout.group_id for s in theirs]),
    }


def _by_prompt(scored: Sequence[Scored]) -> dict[int, list[Scored]]:
    groups: dict[int, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.rollout.group_id, []).append(one)
    return groups


def _outcome(mine: Scored, other: Scored) -> float:
    if mine.reward == other.reward or mine.rollout.response_text == other.rollout.response_text:
        return 0.5
    return float(mine.reward > other.reward)


def _divergence(config: RunConfig, reference: ModelConfig, answers: Sequence[Rollout]) -> dict[str, Any]:
    """Both models' log-probs come from the same kind of forward pass, so that a model's distance to itself is 0."""
    temperature = config.evaluation.temperature
    levels = [1.0] if temperature in (0.0, 1.0) else [1.0, temperature]
    device = "cuda" if config.generator.gpus > 0 else "cpu"
    theirs = response_logprobs(load_sampled(reference, device), answers, levels)
    if not temperature:
        return {"perplexity": perplexity(theirs[0]), "kl": None}
    (ours,) = response_logprobs(load_sampled(config.model, device), answers, levels[-1:])
    groups = [r.group_id for r in answers]
    return {"perplexity": perplexity(theirs[0]), "kl": kl_figures(ours, theirs[-1], groups)}


def _samples(ours: Sequence[Scored], theirs: Sequence[Scored], against: bool) -> list[dict[str, Any]]:
    """Every scored answer with the opponent's answer of the same number, or its first, to the same prompt."""
    others = _by_prompt(theirs)
    samples = []
    for group, own in _by_prompt(ours).items():
        pool = others.get(group, [])
        for number, mine in enumerate(own):
            prompt = mine.rollout.prompt
            response = mine.rollout.response_text
            sample = {"prompt": prompt.text, "response": response, "answer": prompt.answer, "reward": mine.reward}
            if against:
                other = pool[number % len(pool)] if pool else None
                sample["against_response"] = other.rollout.response_text if other is not None else None
                sample["against_reward"] = other.reward if other is not None else None
            samples.append(sample)
    return samples
