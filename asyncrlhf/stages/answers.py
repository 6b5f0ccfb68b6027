"""Answers of a model to the held-out prompts, by the config's engine, and their rewards."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import transformers

from asyncrlhf.actors.annotator import RewardSpec
from asyncrlhf.cluster.parts import episode_spec
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.build_engine import build_engine
from asyncrlhf.engines.engine import said_ids
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.models.vocabulary import sampled_vocabulary
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.redaction import redact
from asyncrlhf.stages.episodes import play
from asyncrlhf.types import Annotation, FinishReason, GenerationRequest, Prompt, Rollout, SamplingParams


class Scored(NamedTuple):
    """An answer with its reward; ``rollout.group_id`` is the index of its prompt."""

    rollout: Rollout
    result: Annotation

    @property
    def reward(self) -> float:
        assert self.result.reward is not None
        return self.result.reward


def sample_answers(
    config: RunConfig,
    model: ModelConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    each: int,
) -> list[Rollout]:
    """``each`` answers of ``model`` to each prompt, or episodes, in their order; ``group_id`` is a prompt's index.

    Answers that the engine could not generate, and failed episodes, are missing. The fake engine has no model; hf is
    used instead.
    """
    kind = "hf" if config.generator.engine == "fake" else config.generator.engine
    device = "cuda" if config.generator.gpus > 0 else "cpu"
    engine = build_engine(
        replace(config.generator, engine=kind),
        model,
        load_model=lambda wanted: load_model(wanted, device),
        vocab_size=sampled_vocabulary(model, tokenizer),
        decode=lambda ids: str(tokenizer.decode(list(ids))),
    )
    requests = [
        GenerationRequest(i, i // each, prompts[i // each], request_seed(config.seed, i), sampling)
        for i in range(each * len(prompts))
    ]

    def read(answer: Rollout, request: GenerationRequest) -> Rollout:
        ids = said_ids(answer, request.sampling).tolist()
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        return replace(answer, response_text=text, generator_id="evaluate", tag=request.tag)

    spec = episode_spec(replace(config, model=model))
    made: list[Rollout] = []
    try:
        if spec is not None:
            most = config.episode.concurrency or config.generator.slots
            made = asyncio.run(play(spec, engine, requests, read, most))
        else:
            engine.submit(requests)
        while engine.in_flight():
            answers = [answer for answer in engine.step(0.0).finished if isinstance(answer, Rollout)]
            made += [read(answer, requests[answer.rollout_id]) for answer in answers]
    finally:
        engine.close()
    return sorted(made, key=lambda answer: answer.rollout_id)


def written(
    texts: Sequence[tuple[int, str, bool]], prompts: Sequence[Prompt], tokenizer: transformers.PreTrainedTokenizerBase
) -> list[Rollout]:
    """Given answers, encoded as the policy's ``tokenizer`` would: (index of the prompt, text, whether it ended)."""
    rollouts = []
    for number, (group, text, ended) in enumerate(texts):
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        ids = [*ids, tokenizer.eos_token_id] if ended else ids
        logprobs, versions = np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int64)
        reason: FinishReason = "stop" if ended else "length"
        sampled = (np.asarray(ids, dtype=np.int64), logprobs, versions)
        rollouts.append(Rollout(number, group, prompts[group], *sampled, reason, text, "evaluate"))
    return rollouts


def score(config: RunConfig, *answers: Sequence[Rollout]) -> list[list[Annotation]]:
    """One result per answer by ``reward.*``, for each list. The services are started once and get ``fusion.max_batch``
    answers at a time, as assumed by their time limits."""
    scorer = RewardSpec(config.reward, config.task, config.model, config.generator.max_completion_length).build().scorer
    size = config.fusion.max_batch
    try:
        results = [
            [result for start in range(0, len(part), size) for result in scorer.score(part[start : start + size])]
            for part in answers
        ]
    finally:
        scorer.close()
    said = {(f.part, f.kind): f.cause for part in results for result in reversed(part) for f in result.faults}
    for (part_name, _), cause in said.items():
        print(f"asyncrlhf: {part_name}: {redact(cause)}", file=sys.stderr)
    return results


def score_answers(config: RunConfig, *answers: Sequence[Rollout]) -> list[list[Scored]]:
    """Each list with its rewards by :func:`score`; answers without a reward are missing."""
    return [
        [Scored(rollout, found) for rollout, found in zip(part, results, strict=True) if found.reward is not None]
        for part, results in zip(answers, score(config, *answers), strict=True)
    ]
