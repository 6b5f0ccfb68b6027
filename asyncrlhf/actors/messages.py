"""The messages between the controller and the actors: metadata and object references, never token arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np

from asyncrlhf.readahead.owners import ChunkInfo
from asyncrlhf.records.spans import SpanBatch
from asyncrlhf.types import (
    Annotation,
    FloatArray,
    GenerationFailure,
    IntArray,
    Payload,
    Prompt,
    Rollout,
    RolloutInfo,
)

# The fields of a rollout: its arrays, of which the last four may be missing; its other fields without the prompt.
ARRAYS = ("response_ids", "behavior_logprobs", "policy_versions", "ref_logprobs", "values", "kept_ids", "kept_counts")
FACTS = ("rollout_id", "group_id", "finish_reason", "response_text", "generator_id", "critic_version", "epoch")
_facts = attrgetter(*FACTS)
R = TypeVar("R")


@dataclass(frozen=True)
class Collected:
    """The rollouts that a generator finished since the last call, and the chunks of unfinished ones; ``busy_seconds``
    and ``tokens`` are running totals, ``ages`` the seconds since the last token of each finished rollout."""

    finished: list[RolloutInfo] = field(default_factory=list)
    failed: list[GenerationFailure] = field(default_factory=list)
    busy_seconds: float = 0.0
    tokens: int = 0
    ages: list[float] = field(default_factory=list)
    chunks: list[ChunkInfo] = field(default_factory=list)
    spans: SpanBatch | None = None  # of the replica, from time to time


class RolloutBundle(Sequence[Rollout]):
    """Several rollouts as a few flat arrays, for transport between processes: single small arrays cost more to send
    than their content, and every sibling would carry a copy of its prompt."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self._rollouts = list(rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)

    def __getitem__(self, index: Any) -> Any:
        return self._rollouts[index]

    def __reduce__(self) -> tuple[Any, ...]:
        prompts = list({id(r.prompt): r.prompt for r in self._rollouts}.values())
        places = {id(prompt): place for place, prompt in enumerate(prompts)}
        facts = [(places[id(r.prompt)], *_facts(r)) for r in self._rollouts]
        return _unpack, (prompts, facts, {name: self._flat(name) for name in ARRAYS})

    def _flat(self, name: str) -> tuple[list[int | None], Any] | None:
        """The length of each rollout's array, None if it has none, and all arrays concatenated; None without arrays."""
        given = [getattr(r, name) for r in self._rollouts]
        there = [array for array in given if array is not None]
        return ([None if a is None else len(a) for a in given], np.concatenate(there)) if there else None


def _unpack(
    prompts: list[Prompt], facts: list[Any], flat: dict[str, tuple[list[int | None], Any] | None]
) -> RolloutBundle:
    arrays = [(name, _cut(*found)) for name, found in flat.items() if found is not None]
    return RolloutBundle(
        Rollout(
            prompt=prompts[place],
            **dict(zip(FACTS, own, strict=True)),
            **{name: parts[i] for name, parts in arrays},
        )
        for i, (place, *own) in enumerate(facts)
    )


def _cut(lengths: list[int | None], flat: Any) -> list[Any]:
    """Each rollout's own part of ``flat``, None if it has none."""
    parts, end = [], 0
    for length in lengths:
        end += length or 0
        parts.append(None if length is None else flat[end - length : end])
    return parts


@dataclass(frozen=True, eq=False)
class ArrayBundle:
    """The arrays that one call of a reference or critic worker computed. Entry i belongs to the i-th rollout answered.

    Args:
        name: the field of a Rollout that the arrays fill: ``ref_logprobs`` or ``values``.
        flat: [sum of L] the arrays of all rollouts, concatenated.
        ends: [N] where the array of each rollout ends in ``flat``.
        critic_version: the version of the critic that computed the values; None if the arrays are not values.
    """

    name: str
    flat: FloatArray
    ends: IntArray
    critic_version: int | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self.ends[index - 1]) if index else 0
        fields: dict[str, Any] = {self.name: self.flat[start : int(self.ends[index])]}
        return fields if self.critic_version is None else {**fields, "critic_version": self.critic_version}


def annotated(
    name: str, rollouts: Sequence[Rollout], answers: Iterable[FloatArray | str], critic_version: int | None = None
) -> tuple[list[Annotation], ArrayBundle]:
    """The annotations of ``rollouts``, in order, and the bundle with their arrays. An answer is the array [L] for the
    field ``name``, or the sentence with the reason for a missing one."""
    arrays: list[FloatArray] = []
    annotations = []
    for rollout, answer in zip(rollouts, answers, strict=True):
        if isinstance(answer, str):
            annotations.append(Annotation(rollout.rollout_id, error=answer))
            continue
        annotations.append(Annotation(rollout.rollout_id, arrays=Payload(None, len(arrays))))
        arrays.append(answer)
    flat = np.concatenate(arrays) if arrays else np.empty(0, np.float32)
    return annotations, ArrayBundle(name, flat, np.cumsum([len(array) for array in arrays]), critic_version)


def placed(annotations: Iterable[Annotation], arrays: Any) -> list[Annotation]:
    """``annotations`` with the place of their arrays; ``arrays`` is the bundle, or a reference to it."""
    return [a if a.arrays is None else replace(a, arrays=Payload(arrays, a.arrays.index)) for a in annotations]


def joined(rollout: Rollout, annotations: Iterable[Mapping[str, Any]]) -> Rollout:
    """The rollout with its annotations' fields filled."""
    for fields in annotations:
        rollout = replace(rollout, **fields)
    return rollout


Address = tuple[tuple[int, int], ...]  # (bundle, index) of a rollout or chunk, then of each annotation's arrays


def resolved(addresses: Iterable[Address], bundles: Sequence[Any]) -> list[Any]:
    """The rollouts or chunks at ``addresses``, rollouts with the arrays of their annotations."""
    found = ([bundles[bundle][index] for bundle, index in address] for address in addresses)
    return [joined(first, annotations) for first, *annotations in found]


@dataclass(frozen=True)
class Offer:
    """A snapshot to be published: the seconds for which snapshots stopped the learner since the previous offer, and the
    learner's log-probs of the audit's probe texts at that version (None when no audit is due)."""

    seconds: float
    probe_logprobs: list[FloatArray] | None = None


@dataclass(frozen=True)
class Told(Generic[R]):
    """An answer, with the part's spans since its previous one."""

    answer: R
    spans: Sequence[SpanBatch]
