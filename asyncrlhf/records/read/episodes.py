"""The turns of recorded episodes: whether they agree with their tokens, and with the weights of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrlhf.records.read.replay import Weights
from asyncrlhf.types import OBSERVED

IntArray = np.ndarray
Tell = Callable[[str, np.ndarray], None]  # adds a finding about rows


@dataclass
class Turns:
    """The turns [K] of all rows [R], and how often each forks. ``faults``: rows by what is wrong with them."""

    of: IntArray  # [R] number of turns
    observed: IntArray  # [R] observed tokens
    row: IntArray  # [K]
    end: IntArray  # [K]
    seconds: np.ndarray  # [K]
    failures: IntArray  # [K]
    replicas: list[str]  # [K] that sampled them
    oldest: IntArray  # [K] smallest version among the tokens; -1 for a turn that is not within its response
    newest: IntArray  # [K]
    faults: dict[str, IntArray] = field(default_factory=dict)
    forks: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [R]

    def add_forks(self, column: pa.ChunkedArray, prompts: IntArray) -> None:
        """Check the column ``forks``: each begins where a turn ends, and follows a token before it, or none.
        ``prompts`` [R]: tokens of the prompt."""
        self.forks = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        start, follows = (part.to_numpy() for part in pc.list_flatten(column).combine_chunks().flatten())
        row = np.repeat(np.arange(len(self.forks)), self.forks)
        ends = set(zip(self.row.tolist(), self.end.tolist(), strict=True))
        begun = np.array([place in ends for place in zip(row.tolist(), start.tolist(), strict=True)], np.bool_)
        self.faults["rollouts {ids} have a branch that begins within a turn or an observation."] = np.unique(
            row[~begun]
        )
        outside = (follows < -1) | (follows >= prompts[row] + start - 1)
        self.faults["rollouts {ids} have a branch that follows no token before it."] = np.unique(row[outside])

    def check_weights(self, ids: IntArray, weights: Mapping[int, Weights], tell: Tell) -> None:
        """Check each turn's versions: none is older than the one that its replica held when the episode began, or newer
        than the last that it was asked to load before the episode's end. ``weights``: by rollout id."""
        found: dict[str, list[int]] = {}
        for k, row in enumerate(self.row.tolist()):
            held, asked = weights.get(int(ids[row]), ({}, None))
            if asked is None or self.oldest[k] < 0:
                continue  # it did not finish, by the journal; or it has no versions
            replica = self.replicas[k]
            if replica not in asked:
                found.setdefault("rollouts {ids} have a turn of a replica without weights.", []).append(row)
            elif self.newest[k] > asked[replica]:
                said = "rollouts {ids} have a turn with a version that its replica was not given."
                found.setdefault(said, []).append(row)
            elif self.oldest[k] < held.get(replica, 0):
                said = "rollouts {ids} have a turn with a token older than its replica's weights."
                found.setdefault(said, []).append(row)
        for said, rows in found.items():
            tell(said, np.unique(rows))

    def figures(self, row: IntArray, at: IntArray, lengths: IntArray, total: int) -> dict[str, np.ndarray]:
        """The metrics of each step [total] about its episodes; NaN in a step without any. ``row``, ``at`` [U]: rows
        and steps of all uses; ``lengths`` [R]: sampled tokens."""
        size, ends = len(self.of), np.cumsum(self.of)
        own = self.of[row] > 0
        episode, step = row[own], at[own]
        count, forks = np.bincount(step, minlength=total), self.forks[episode]
        none = np.where(count > 0, 1.0, np.nan)

        def means(values: np.ndarray) -> np.ndarray:
            return np.asarray(none * np.bincount(step, values, total) / np.maximum(count, 1))

        observed = np.bincount(at, self.observed[row], total)
        whole = observed + np.bincount(at, lengths[row], total)
        return {
            "turns_mean": means(self.of[episode]),
            "forks_mean": np.where(np.bincount(step, forks, total) > 0, means(forks), np.nan),
            "observed_fraction": none * observed / np.maximum(whole, 1),
            "tool_seconds_mean": means(np.bincount(self.row, self.seconds, size)[episode]),
            "tool_failures_mean": means(np.bincount(self.row, self.failures, size)[episode]),
            "turn_staleness_first_mean": means(step - self.oldest[(ends - self.of)[episode]]),
            "turn_staleness_last_mean": means(step - self.oldest[ends[episode] - 1]),
        }


def read_turns(column: pa.ChunkedArray, lengths: IntArray, versions: IntArray) -> Turns:
    """From the column ``turns``, the lengths [R] of all responses and their tokens' versions, concatenated. The whole
    response of a row without turns counts as sampled."""
    of = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    table = pc.list_flatten(column).combine_chunks().flatten()
    names = [own.name for own in column.type.value_type]
    flat = dict(zip(names, table, strict=True))
    start, end, failures = (flat[name].to_numpy(zero_copy_only=False) for name in ("start", "end", "failures"))
    row, replicas = np.repeat(np.arange(len(of)), of), [name or "" for name in flat["generator_id"].to_pylist()]

    faults: dict[str, IntArray] = {}
    outside = (start < 0) | (end > lengths[row]) | (start >= end)
    faults["rollouts {ids} have a turn that is empty or leaves their response."] = np.unique(row[outside])
    crossed = (np.diff(row) == 0) & (start[1:] < end[:-1])
    faults["rollouts {ids} have turns that overlap or are out of order."] = np.unique(row[1:][crossed])
    bad = np.zeros(len(of), dtype=bool)
    bad[np.concatenate(list(faults.values()))] = True

    begin = np.cumsum(lengths) - lengths  # of each response
    good = np.flatnonzero(~bad[row])
    first, last = (begin[row] + start)[good], (begin[row] + end)[good]
    of_token, sampled = np.repeat(np.arange(len(of)), lengths), versions != OBSERVED
    marks = np.zeros(len(versions) + 1, dtype=np.int8)
    marks[first] += 1
    marks[last] -= 1
    within = (np.cumsum(marks[:-1], dtype=np.int8) > 0) | np.repeat(of == 0, lengths)
    told = ~np.repeat(bad, lengths)
    silent = np.unique(of_token[within & ~sampled & told])
    faults["rollouts {ids} have an observed token within a turn."] = silent[of[silent] > 0]
    faults["rollouts {ids} have an observed token and no turns."] = silent[of[silent] == 0]
    faults["rollouts {ids} have a sampled token outside of their turns."] = np.unique(
        of_token[~within & sampled & told]
    )
    faults["rollouts {ids} have a token older than the one before it."] = _falls(
        of_token, versions, sampled & told, first, [replicas[k] for k in good]
    )
    oldest, newest = (np.full(len(row), -1) for _ in range(2))
    if len(good):
        edges = np.stack([first, last], 1).ravel()
        padded = np.append(versions, OBSERVED)
        oldest[good] = np.minimum.reduceat(padded, edges)[::2]
        newest[good] = np.maximum.reduceat(padded, edges)[::2]
    observed = np.bincount(of_token[~sampled], minlength=len(of))
    seconds = flat["seconds"].to_numpy(zero_copy_only=False)
    return Turns(of, observed, row, end, seconds, failures, replicas, oldest, newest, faults)


def _falls(
    of_token: IntArray, versions: IntArray, sampled: np.ndarray, first: IntArray, replicas: list[str]
) -> IntArray:
    """Rows in which a sampled token is older than the one before it, except between turns of two replicas, of which the
    second may hold older weights. ``first``: where turns begin, ``replicas``: who sampled them."""
    among = slice(None) if sampled.all() else sampled
    fell = np.flatnonzero((np.diff(versions[among]) < 0) & (np.diff(of_token[among]) == 0))
    rows = of_token[among][fell]
    if len(fell) and len(first):
        at, names = np.flatnonzero(sampled), np.array(replicas)
        before, after = (np.searchsorted(first, at[fell + step], side="right") - 1 for step in (0, 1))
        # In a row without turns both tokens lie after the same turn, of another row.
        rows = rows[(before == after) | (names[before] == names[after])]
    return np.unique(rows)
