"""The held-out evaluation of a run: which prompts are answered, by which replicas, and what is measured."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING, Any

from asyncrlhf.cluster.handles import AnnotatorHandle, Runtime, WorkerLostError
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import EvaluationConfig
from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.errors import ConfigError, ReplicaError
from asyncrlhf.models.checkpoint_folder import context_length
from asyncrlhf.orchestrator.rollouts.annotate import annotate
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.tasks.build_task import evaluation_prompts, evaluation_task
from asyncrlhf.types import Annotation, GenerationRequest, Prompt, Rollout, SamplingParams
from asyncrlhf.validation import check

if TYPE_CHECKING:
    import transformers

OWN = ""  # the name of the task's own held-out prompts among the sets


@dataclass(frozen=True)
class Question:
    """One answer to ask for. ``number``: of the prompt within its set."""

    set: str
    number: int
    prompt: Prompt
    seed: int


@dataclass(frozen=True)
class Measured:
    """``metrics``: as in metrics.jsonl. ``answers``: one row of ``evaluations/*.parquet`` per answer, without the step;
    ``reward`` is None for one that could not be scored."""

    metrics: dict[str, float]
    answers: list[dict[str, Any]]


class HeldOut:
    """Mean reward, an accuracy if the reward is 0 or 1, and pass@k of the answers to held-out prompts and to those of
    ``evaluation.sets``, sampled as ``evaluation.*`` says.

    The prompts are sent to the live replicas as requests with negative ids, beside the rollouts that they sample; the
    figures are over the answers that could be scored. An answer's seed does not depend on the step.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        runtime: Runtime,
        sets: Mapping[str, Sequence[Prompt]] | None = None,
        settings: EvaluationConfig | None = None,
        seed: int = 0,
    ) -> None:
        self._settings = settings or EvaluationConfig()
        temperature = self._settings.temperature
        self._sampling = replace(sampling, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
        self._runtime = runtime
        self.play: Callable[[Sequence[GenerationRequest]], Awaitable[list[Rollout]]] | None = None  # of episodes
        self._ids = itertools.count(-1, -1)
        asked = [(name, i, p) for name, own in {OWN: prompts, **(sets or {})}.items() for i, p in enumerate(own)]
        each = range(self._settings.num_generations)
        self._questions = [
            Question(*facts, request_seed(seed, -1 - place) if temperature else 0)
            for place, (facts, _) in enumerate(itertools.product(asked, each))
        ]

    async def measure(self, replicas: list[Replica], state: RunState) -> Measured | None:
        """None without prompts or without a scored answer. When a replica dies, the live ones take over its prompts; if
        none is alive, the first one that comes back does."""
        by_id: dict[int, Question] = {}
        rollouts: list[Rollout] = []
        left = self._questions
        if self.play is not None and left:
            rollouts, left = await self.play(self._requests(left, by_id)), []
        while left:
            await state.changed.wait_for(lambda: _able(state.replicas))
            able = (_able(replicas) or _able(state.replicas))[: len(left)]
            shares = [left[i :: len(able)] for i in range(len(able))]
            requests = [self._requests(own, by_id) for own in shares]
            asked = [state.heard(r, r.handle.generate(own)) for r, own in zip(able, requests, strict=True)]
            answers = await asyncio.gather(*asked)
            rollouts += [rollout for found in answers for rollout in found or ()]
            left = [q for own, found in zip(shares, answers, strict=True) if found is None for q in own]
        results = await self._score(rollouts, self._runtime.rewards[0], state.progressed) if rollouts else []
        state.batch_faults([fault for result in results for fault in result.faults])
        given = {result.rollout_id: result.reward for result in results}
        answered = [(by_id[rollout.rollout_id], rollout, given.get(rollout.rollout_id)) for rollout in rollouts]
        metrics = dict(self._metrics([(question, reward) for question, _, reward in answered if reward is not None]))
        return Measured(metrics, [_row(*answer) for answer in answered]) if metrics else None

    def _requests(self, questions: Sequence[Question], by_id: dict[int, Question]) -> list[GenerationRequest]:
        """The requests of these questions, which are entered under their ids."""
        own = {next(self._ids): question for question in questions}
        by_id |= own
        return [GenerationRequest(i, i, question.prompt, question.seed, self._sampling) for i, question in own.items()]

    async def _score(
        self, rollouts: list[Rollout], worker: AnnotatorHandle, moved: Callable[[], None]
    ) -> list[Annotation]:
        """Score all answers in one call; if the worker dies in it, score each in a call of its own. An answer whose own
        call fails has no score."""
        try:
            return await annotate(worker, self._runtime.store(rollouts), moved)
        except WorkerLostError:
            raise
        except ReplicaError as error:
            if len(rollouts) == 1:
                return [Annotation(rollouts[0].rollout_id, None, error=str(error))]
        return [result for rollout in rollouts for result in await self._score([rollout], worker, moved)]

    def _metrics(self, scored: Sequence[tuple[Question, float]]) -> Iterator[tuple[str, float]]:
        for name in dict.fromkeys(question.set for question, _ in scored):
            key = f"heldout/{name}/" if name != OWN else "heldout_"
            by_prompt: dict[int, list[float]] = {}
            for question, reward in scored:
                if question.set == name:
                    by_prompt.setdefault(question.number, []).append(reward)
            rewards = [reward for own in by_prompt.values() for reward in own]
            yield f"{key}accuracy", sum(rewards) / len(rewards)
            for k in self._settings.pass_k:
                right = [[reward >= self._settings.pass_reward for reward in own] for own in by_prompt.values()]
                if chances := [pass_at_k(own, k) for own in right if len(own) >= k]:
                    yield f"{key}pass_at_{k}", sum(chances) / len(chances)


def _able(replicas: list[Replica]) -> list[Replica]:
    """The replicas that hold weights."""
    return [r for r in replicas if r.alive and r.version >= 0]


def _row(question: Question, rollout: Rollout, reward: float | None) -> dict[str, Any]:
    prompt = question.prompt
    return {
        "set": question.set,
        "prompt": prompt.text,
        "response": rollout.response_text,
        "answer": prompt.answer,
        "reward": reward,
        "tokens": len(rollout.response_ids),
    }


def evaluation_sets(config: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, list[Prompt]]:
    """The prompts of ``evaluation.sets`` by name. Raises ConfigError for a set that the run could not answer or that
    its reward workers could not score."""
    room = context_length(config.model) - config.generator.max_completion_length
    found: dict[str, list[Prompt]] = {}
    for name, given in (config.evaluation.sets or {}).items():
        key = f"evaluation.sets.{name}"
        task = evaluation_task(config.task, given, key)
        by_rule = any(part.kind == "task" for part in config.reward.sources.values())
        check(
            not by_rule or _same_rule(task, config.task),
            f"{key} needs the rule of another task (task.kind={task.kind}) than the run's (task.kind="
            f"{config.task.kind}); allowed in a run: a set of the same kind, or reward.kind=python. "
            "`asyncrlhf evaluate run=RUN` measures every set.",
        )
        try:
            limit = min(task.max_prompt_length, max(1, room))
            found[name] = evaluation_prompts(replace(task, max_prompt_length=limit), tokenizer)
        except ConfigError as error:
            raise ConfigError(f"In {key}: {error}") from error
        check(
            not by_rule or any(prompt.answer for prompt in found[name]),
            f"{key} has no column task.answer_key={task.answer_key}, with which the task's rule compares answers.",
        )
    return found


def _same_rule(one: TaskConfig, other: TaskConfig) -> bool:
    """Whether the rule of ``other`` scores the answers to ``one``."""
    known = set(one.datasets) <= set(other.datasets) and one.dataset_options == other.dataset_options
    return one.kind == other.kind and (one.kind != "reasoning_gym" or known)


def pass_at_k(right: Sequence[bool], k: int) -> float:
    """The unbiased estimate of the chance that one of k answers is right, from n >= k answers, c of them ``right``:
    1 - C(n - c, k) / C(n, k) (Chen et al., 2107.03374, eq. 1)."""
    return 1.0 - comb(len(right) - sum(right), k) / comb(len(right), k)
