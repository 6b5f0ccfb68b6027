"""The messages between the controller and the actors: metadata and object references, never token arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, takewhile
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np

from asyncrlhf.readahead.owners import ChunkInfo
from asyncrlhf.records.write.spans import SpanBatch
from asyncrlhf.types import (
    Annotation,
    FloatArray,
    GenerationFailure,
    GenerationRequest,
    IntArray,
    Payload,
    Prompt,
    Rollout,
    RolloutInfo,
)

# The fields of a rollout: its arrays, of which the last five may be missing; its other fields without the prompt.
ARRAYS = (
    "response_ids", "behavior_logprobs", "policy_versions", "ref_logprobs", "values", "kept_ids", "kept_counts",
    "routed_experts",
)  # fmt: skip
FACTS = (
    "rollout_id", "group_id", "finish_reason", "response_text", "generator_id", "critic_version", "epoch", "tag",
    "turns", "episode_reward", "messages", "environment", "forks", "measured",
    "stayed",
)  # fmt: skip
# What a replica tells of a finished rollout: these five, and the first fields of a RolloutInfo, up to its payload.
_told = attrgetter(
    "epoch",
    "tag",
    "observed_length",
    "episode",
    "logged",
    *takewhile(lambda name: name != "payload", (own.name for own in fields(RolloutInfo))),
)
# Of a turn's request, in the order of its fields.
_asked = attrgetter("rollout_id", "group_id", "prompt.prompt_id", "seed", "sampling", "epoch", "tag")
NO_ARRAYS = dict.fromkeys(ARRAYS)
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

    def __reduce__(self) -> tuple[Any, ...]:
        others = (self.failed, self.busy_seconds, self.tokens, self.ages, self.chunks, self.spans)
        return _collected, (told_infos(self.finished), *others)


def _collected(told: Iterable[Sequence[Any]], *others: Any) -> Collected:
    return Collected(infos_of(told), *others)


def told_infos(infos: Iterable[RolloutInfo]) -> tuple[Any, ...]:
    """Of rollouts only what their maker knows: an object with all of its fields costs three times as much."""
    return tuple(map(_told, infos))


def infos_of(told: Iterable[Sequence[Any]]) -> list[RolloutInfo]:
    """The inverse of :func:`told_infos`; the payload's index is the place."""
    return [
        RolloutInfo(  # type: ignore[misc]
            *own,
            payload=Payload(None, i),
            epoch=epoch,
            tag=tag,
            observed_length=observed,
            episode=episode,
            logged=logged,
        )
        for i, (epoch, tag, observed, episode, logged, *own) in enumerate(told)
    ]


class Alike(tuple[R, ...]):
    """Objects of one dataclass, which travel as the values of their fields: an object costs several times as much."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return Alike, ()
        kind: Any = type(self[0])
        return _alike, (kind, tuple(map(attrgetter(*(own.name for own in fields(kind))), self)))


def _alike(kind: Callable[..., R], values: Iterable[Iterable[Any]]) -> Alike[R]:
    return Alike(kind(*own) for own in values)


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
        rollouts = self._rollouts
        prompts = list({id(r.prompt): r.prompt for r in rollouts}.values())
        places = {id(prompt): place for place, prompt in enumerate(prompts)}
        facts = tuple(zip(*map(_facts, rollouts), strict=True))
        arrays = {name: found for name in ARRAYS if (found := _flat([getattr(r, name) for r in rollouts])) is not None}
        told = [(p.prompt_id, p.text, p.answer, p.metadata, p.messages) for p in prompts]
        return ArrivedBundle, (
            told, _flat([p.token_ids for p in prompts]), [places[id(r.prompt)] for r in rollouts], facts, arrays
        )  # fmt: skip


class TurnBundle(Sequence[GenerationRequest]):
    """Requests of turns as one flat array, as in :class:`RolloutBundle`. An engine reads only the tokens of their
    prompts, so that nothing else of a prompt travels."""

    def __init__(self, requests: Iterable[GenerationRequest]) -> None:
        self._requests = list(requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        return self._requests[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _turns, (_flat([r.prompt_ids for r in self._requests]), tuple(map(_asked, self._requests)))


def _turns(prompt_ids: Flat | None, asked: Iterable[Sequence[Any]]) -> TurnBundle:
    return TurnBundle(
        GenerationRequest(rollout_id, group_id, Prompt(name, "", ids), *rest)
        for (rollout_id, group_id, name, *rest), ids in zip(asked, _cuts(prompt_ids), strict=True)
    )


Flat = tuple[tuple[int | None, ...], Any]  # the length of each array, None if it is missing, and all concatenated


def _flat(arrays: Sequence[Any]) -> Flat | None:
    """None if there is no array."""
    there = [array for array in arrays if array is not None]
    return (tuple(None if a is None else len(a) for a in arrays), np.concatenate(there)) if there else None


class ArrivedBundle(Sequence[Rollout]):
    """A :class:`RolloutBundle` in the process that received it. It creates a rollout each time it is read, and does not
    check its arrays a second time: several processes receive each bundle, and some read only a part of it."""

    def __init__(
        self, prompts: list[Any], prompt_ids: Flat | None, places: list[int], facts: Any, arrays: dict[str, Flat]
    ) -> None:
        self._packed = prompts, prompt_ids, places, facts, arrays
        self._prompts = [
            Prompt(name, text, ids, answer, metadata, messages)
            for (name, text, answer, metadata, messages), ids in zip(prompts, _cuts(prompt_ids), strict=True)
        ]
        self._places, self._facts = places, tuple(zip(FACTS, facts, strict=bool(places)))
        self._arrays = {name: (lengths, _ends(lengths), flat) for name, (lengths, flat) in arrays.items()}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self._places))[index]
        rollout = object.__new__(Rollout)
        fields = vars(rollout)
        fields.update(NO_ARRAYS)
        fields["prompt"] = self._prompts[self._places[place]]
        for name, column in self._facts:
            fields[name] = column[place]
        for name, (lengths, ends, flat) in self._arrays.items():
            if (length := lengths[place]) is not None:
                fields[name] = flat[ends[place] - length : ends[place]]
        return rollout

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivedBundle, self._packed


def _ends(lengths: Sequence[int | None]) -> list[int]:
    return list(accumulate(length or 0 for length in lengths))


def _cuts(found: Flat | None) -> list[Any]:
    """Each array's own part, of arrays of which none is missing."""
    lengths, flat = found or ((), ())
    return [flat[end - (length or 0) : end] for length, end in zip(lengths, _ends(lengths), strict=True)]


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
    for arrays in annotations:
        rollout = replace(rollout, **arrays)
    return rollout


Address = tuple[tuple[int, int], ...]  # (bundle, index) of a rollout or chunk, then of each annotation's arrays


def resolved(addresses: Iterable[Address], bundles: Sequence[Any]) -> list[Any]:
    """The rollouts or chunks at ``addresses``, rollouts with the arrays of their annotations."""
    found = ([bundles[bundle][index] for bundle, index in address] for address in addresses)
    return [joined(first, annotations) for first, *annotations in found]


@dataclass(frozen=True)
class Offer:
    """A snapshot to be published: the seconds for which snapshots stopped the learner since the previous offer, and the
    learner's log-probs of the audit's probe texts at that version (None when no audit is due). ``note``: a sentence for
    the user on how the learner works; empty if there is none."""

    seconds: float
    probe_logprobs: list[FloatArray] | None = None
    note: str = ""


@dataclass(frozen=True)
class Told(Generic[R]):
    """An answer, with the part's spans since its previous one."""

    answer: R
    spans: Sequence[SpanBatch]
