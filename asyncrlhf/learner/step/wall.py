"""How the learner passes a model's sequences: packed, or one after the other. Found by comparing, before it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.halves import Halves
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import is_packed, trunk_of
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig, check_whole_sequences
from asyncrlhf.learner.step.passes import ForwardPasses
from asyncrlhf.models.miniature import Family
from asyncrlhf.models.plain_pass import (
    MISCALLED,
    difference,
    first_line,
    plain_logits,
    probe_texts,
    rounding,
    set_attention,
)
from asyncrlhf.models.vocabulary import sampled_ids
from asyncrlhf.types import IntArray, TrainBatch

# Of ``rounding``: a neighbour's tokens do not change the operations on a sequence's own, only the experts' batches.
LEAK = 0.01


@torch.no_grad()
def unlike_autocast(policy: PackedPolicy, dtype: torch.dtype) -> str:
    """Why ``policy`` cannot pass texts with all of its weights in ``dtype``, as a part of a sentence; "" if it can. A
    model whose weights are not here yet is tried as a small one of its family."""
    model = policy.model
    if next(model.parameters()).is_meta:
        small = Family.of(model).small()
        return "" if small is None else unlike_autocast(choose_policy(small)[0], dtype)
    texts = _shuffled(*probe_texts(model))
    exact = _logprobs(policy, texts)
    halves = Halves(model, trunk_of(model), dtype)
    try:
        found = _logprobs(policy, texts)
    except MISCALLED as error:
        return first_line(error)
    finally:
        halves.end()
    apart = max(difference(ours, theirs, dtype) for ours, theirs in zip(found, exact, strict=True))
    return "" if apart <= rounding(dtype) else f"log-probs are {apart:.1g} off those of its float32 weights"


@dataclass(frozen=True)
class Way:
    """``attention``: transformers' name of the model's own attention; None for packed sequences, which have ours."""

    attention: str | None

    @property
    def name(self) -> str:
        return (
            "packed sequences" if self.attention is None else f"one sequence at a time with {self.attention} attention"
        )

    def policy(self, model: transformers.PreTrainedModel, **options: Any) -> PackedPolicy:
        if self.attention is not None:
            set_attention(model, self.attention)
        return PackedPolicy(model, packing=self.attention is None, **options)


def choose_policy(
    model: transformers.PreTrainedModel, packing: bool | None = None, **options: Any
) -> tuple[PackedPolicy, str]:
    """``model`` as a policy whose log-probs are those of each sequence alone, and why it is not packed; "" if it is.

    Candidates are tried from the fastest on. ``packing`` True or False allows only packed passes or none. A tiny model
    of the same family is compared first, whose windows the texts exceed; then the model itself, unless its weights
    are not here yet. ``options``: of :class:`PackedPolicy`. Raises ConfigError if no way is right.
    """
    own = "eager" if is_packed(model) else str(model.config._attn_implementation)
    ways: tuple[Way, ...] = () if packing is False else (Way(None),)
    ways += () if packing else (Way(own),) if own == "eager" else (Way(own), Way("eager"))
    found = _family_ways(Family.of(model), ways)
    right, reason = found or (ways, "")
    if next(model.parameters()).is_meta:
        policy = right[0].policy(model, **options)
    else:
        _, policy, why = _right_ways(model, right, options, thorough=found is None)
        reason = reason or why
    return policy, "" if policy.packing else reason


def learner_policy(
    model: transformers.PreTrainedModel, config: LearnerConfig, algorithm: AlgorithmConfig
) -> tuple[PackedPolicy, str]:
    """As :func:`choose_policy`, as the settings ask, with a sentence for the user instead of the reason."""
    options = {"collision": algorithm.advantage == "opob", "chunked": config.zero_stage < 3}
    policy, reason = choose_policy(model, config.packing, **options)
    if reason:
        check_whole_sequences(config, reason)
    return policy, reason and f"The learner passes one sequence at a time, which is slower than packed: {reason}."


@lru_cache(maxsize=32)
def _family_ways(family: Family, ways: tuple[Way, ...]) -> tuple[tuple[Way, ...], str] | None:
    """The ways that are right for a small model of the family, and why the first ones are not; None without such a
    model."""
    small = family.small()
    if small is None:
        return None
    found, _, reason = _right_ways(small, ways, {}, thorough=True)
    return found, reason


def _right_ways(
    model: transformers.PreTrainedModel, ways: Sequence[Way], options: Mapping[str, Any], thorough: bool
) -> tuple[tuple[Way, ...], PackedPolicy, str]:
    """The first of ``ways`` that is right for ``model`` with those after it, its policy, and what was wrong with those
    before. ``thorough``: also that no token sees later ones, nor, as exactly as can be, those of other sequences."""
    texts = probe_texts(model)
    plain = plain_logits(model, texts[1:], causal=thorough)
    reasons: list[str] = []
    for place, way in enumerate(ways):
        try:
            policy = way.policy(model, **options)
            problem = _problem(policy, texts, plain, thorough)
        except (ConfigError, *MISCALLED) as error:
            problem = first_line(error).removeprefix("model.path: ")
        if problem is None:
            return tuple(ways[place:]), policy, "; ".join(reasons)
        reasons.append(f"{way.name}: {problem}")
    raise ConfigError(
        f"model.path: {type(model).__name__} cannot be trained{_allowed(ways)}: {'; '.join(dict.fromkeys(reasons))}."
    )


def _allowed(ways: Sequence[Way]) -> str:
    if ways[-1].attention is None:
        return " with learner.packing=true"
    return "" if ways[0].attention is None else " with learner.packing=false"


@torch.no_grad()
def _problem(
    policy: PackedPolicy, texts: Sequence[IntArray], plain: Sequence[torch.Tensor], thorough: bool
) -> str | None:
    """What is wrong with ``policy``, as a part of a sentence. ``plain``: the logits of all texts but the first."""
    dtype, sampled = policy.model.dtype, sampled_ids(policy.model)
    found = _logprobs(policy, _shuffled(texts[0], texts[1], texts[2]))
    if policy.packing and thorough:
        others = [(text + 1) % max(int(text.max()), 2) for text in texts]
        moved = _logprobs(policy, _shuffled(others[0], others[1], texts[2]))
        leak = difference(moved[1], found[1], dtype)
        if leak > LEAK * rounding(dtype):
            return f"a sequence's log-probs change by {leak:.1g} with its neighbours' tokens"
    expected = [_own_logprobs(logits[:, :sampled], text) for logits, text in zip(plain, texts[1:], strict=True)]
    apart = max(difference(ours, theirs, dtype) for ours, theirs in zip(found[:2], expected, strict=True))
    if not apart <= rounding(dtype):  # not a number, too
        return f"log-probs are {apart:.1g} off the model's own pass over each sequence alone"
    return None


def _shuffled(short: IntArray, middle: IntArray, long: IntArray) -> list[IntArray]:
    """The longest text between others, and after them a sibling that shares the prompt of one."""
    return [middle, long, short, np.concatenate([middle[:4], short[1:]])]


def _logprobs(policy: PackedPolicy, texts: Sequence[IntArray]) -> list[torch.Tensor]:
    """The log-probs of the tokens from place 4 on of each text, in one pass."""
    lengths = np.array([len(text) for text in texts])
    predicted = np.concatenate([np.arange(n) >= 4 for n in lengths])
    inputs = PackedInputs.build(
        np.concatenate(texts), np.concatenate([[0], np.cumsum(lengths)]), predicted, policy.model.device
    )
    return list(policy.alone(inputs, 1.0).logprobs.double().split((lengths - 4).tolist()))


def _own_logprobs(logits: torch.Tensor, text: IntArray) -> torch.Tensor:
    following = torch.from_numpy(text[4:, None]).to(logits.device)
    return logits[3:-1].log_softmax(-1).gather(1, following)[:, 0]


def check_branches(batch: TrainBatch, config: LearnerConfig, policy: PackedPolicy) -> None:
    """Raise AsyncRLHFError for episodes that fork where ranks would then call a sharded model unequally often."""
    if batch.follows is not None and config.sharded and not policy.packing:
        raise AsyncRLHFError(
            "A batch has episodes that fork, and this sharded learner passes one sequence at a time, as many as the "
            "other ranks; allowed: episode.history=keep, or a model that trains packed."
        )


def check_shards(passes: ForwardPasses, policy: Any, texts: Sequence[IntArray], token_budget: int) -> None:
    """Raise ConfigError unless ``policy``, spread over ranks that all call this, gives packed texts the log-probs of
    each text alone."""
    order = [texts[1], texts[2], texts[0]]
    together = passes.score(policy, order, token_budget)
    for text, found in zip(order, together, strict=True):
        alone = passes.score(policy, [text], token_budget)[0]
        apart = difference(torch.from_numpy(found), torch.from_numpy(alone), passes.dtype)
        if not apart <= rounding(passes.dtype):
            raise ConfigError(
                f"model.path: this model cannot be trained packed in this layout over the ranks: a sequence's "
                f"log-probs differ by {apart:.1g} from those of the sequence alone; allowed: learner.packing=false."
            )
