"""Made-up stories of chunks: what may come of sequences under way, for tests of all who read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.types import Rollout
from tests.unit.rewards.worlds import rollout

VOCABULARY = 19
PROMPTS = ([5, 6, 7], [5, 6, 8, 9, 10, 11, 12], [3])


def chunk(done: Rollout, start: int, stop: int) -> Chunk:
    ids = np.concatenate([done.prompt.token_ids, done.response_ids])
    return Chunk(done.rollout_id, start, len(done.prompt.token_ids), ids[start:stop].tolist())


def pieces(done: Rollout, cuts: Sequence[int]) -> list[Chunk]:
    """The chunks of one sequence, cut after so many response tokens each."""
    first = len(done.prompt.token_ids)
    places = [0, *sorted({first + min(cut, len(done.response_ids)) for cut in cuts})]
    return [chunk(done, start, stop) for start, stop in pairwise(places)]


@dataclass(frozen=True)
class Story:
    """Rollouts, and calls of chunks as they came: lost, late, twice, out of order, of another sequence's tokens."""

    rollouts: list[Rollout]
    calls: list[list[Chunk]]
    released: list[int]
    order: list[int]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    tokens = np.random.default_rng(draw(st.integers(0, 2**16)))
    rollouts = [
        rollout(
            number, "", ids=tokens.integers(0, VOCABULARY, draw(st.integers(0, 40))).tolist(),
            prompt_ids=draw(st.sampled_from(PROMPTS)), finish=draw(st.sampled_from(["stop", "length"])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    chunks = []
    for done in rollouts:
        made = pieces(done, draw(st.lists(st.integers(0, 40), max_size=4)))
        chunks += [c for c in made if draw(st.integers(0, 4))]
        if made and not draw(st.integers(0, 3)):  # a generator that died had sampled another end
            wrong = made[-1]
            chunks.append(
                Chunk(
                    done.rollout_id,
                    wrong.start,
                    wrong.prompt_length,
                    [(token + 1) % VOCABULARY for token in wrong.token_ids],
                )
            )
    chunks += [chunks[i] for i in draw(st.lists(st.integers(0, max(len(chunks) - 1, 0)), max_size=3)) if chunks]
    if draw(st.booleans()):
        chunks = draw(st.permutations(chunks))
    size = draw(st.integers(1, 6))
    calls = [list(chunks[i : i + size]) for i in range(0, len(chunks), size)]
    released = [r.rollout_id for r in rollouts if not draw(st.integers(0, 5))]
    return Story(rollouts, calls, released, list(draw(st.permutations(range(len(rollouts))))))
