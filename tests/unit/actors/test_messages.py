"""What travels between the processes of a run arrives whole."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrlhf.actors.episodes import EpisodeNews, TurnWanted
from asyncrlhf.actors.messages import Alike, Collected, RolloutBundle, TurnBundle
from asyncrlhf.actors.part import RecordActor
from asyncrlhf.actors.worker import describe
from asyncrlhf.buffer.held import group_from_json, group_to_json
from asyncrlhf.readahead.owners import ChunkInfo
from asyncrlhf.records.write.rollout_rows import RolloutRow, undo_uses, write_part
from asyncrlhf.records.write.spans import SpanBatch
from asyncrlhf.turns import EpisodeFacts, Fork, Turn
from asyncrlhf.types import (
    OBSERVED,
    GenerationFailure,
    GenerationRequest,
    Payload,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
)


def prompt(number: int) -> Prompt:
    ids = np.arange(number, 2 * number + 3)
    return Prompt(f"p{number}", f"text {number}", ids, str(number), {"level": number}, [{"role": "user"}])


def rollout(number: int, of: Prompt) -> Rollout:
    length = 1 + number % 4
    return Rollout(
        number,
        number // 2,
        of,
        np.arange(length),
        np.linspace(-1.0, 0.0, length, dtype=np.float32),
        np.full(length, 40 + number),
        "stop" if number % 2 else "length",
        response_text=f"answer {number}",
        generator_id="generator-1",
        epoch=number % 3,
    )


def rollouts() -> list[Rollout]:
    prompts = [prompt(number) for number in range(3)]
    return [rollout(number, prompts[number // 2]) for number in range(6)]


def episode() -> Rollout:
    turns = Turn(0, 2, "g-0", ("search", "\ud800"), 1.5, 1), Turn(3, 6, "g-1", (), 0.5, 0, 0.25)
    versions, logprobs = np.array([5, 6, OBSERVED, 4, 7, 7]), np.full(6, -1.0, np.float32)
    told: dict[str, Any] = {"tag": 3, "turns": turns, "episode_reward": 1.0, "forks": (Fork(2, 0),)}
    return Rollout(8, 4, prompt(1), np.arange(6), logprobs, versions, "stop", **told)


def travelled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def assert_equal(one: Any, other: Any) -> None:
    """Of every field, and of the prompt's."""
    for name in (own.name for own in fields(one)):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, Prompt):
            assert_equal(a, b)
        elif isinstance(a, np.ndarray):
            assert np.array_equal(a, b) and a.dtype == b.dtype, name
        else:
            assert a == b, name


def test_a_bundle_brings_every_field_and_any_part_of_it_can_be_read() -> None:
    given = rollouts()
    there = travelled(RolloutBundle(given))
    assert len(there) == len(given)
    assert_equal(given[4], there[4])  # before any other
    for one, other in zip(given, there, strict=True):
        assert_equal(one, other)
        assert set(vars(other)) == {own.name for own in fields(Rollout)}
        assert_equal(one, replace(other))  # which checks the arrays
    assert_equal(given[-1], there[-1])
    with pytest.raises(IndexError):
        there[len(given)]


def test_an_episode_brings_its_turns_and_facts_about_them(tmp_path: Path) -> None:
    given = episode()
    assert_equal(given, travelled(RolloutBundle([given, *rollouts()]))[0])
    told = travelled(Collected(describe([given, *rollouts()]), ages=[0.0] * 7)).finished
    info = told[0]
    assert info.episode == EpisodeFacts(2, 2.0, 2, 1, first_version=5, last_version=4, forks=1)
    assert (info.response_length, info.observed_length, info.min_version, info.max_version) == (5, 1, 4, 7)
    assert [other.episode for other in told[1:]] == [None] * 6
    info.reward = told[1].reward = 0.5
    group = RolloutGroup(4, (info, told[1]))
    saved = json.loads(json.dumps(group_to_json(group)))
    assert group_from_json(saved, {8: info.payload, 0: told[1].payload}) == group

    used = RolloutRow(8, 4, "", "trained", 0.0, consumed_at_version=(7, 9), staleness=5)
    write_part(tmp_path / "part-00000.parquet", [used], [given])
    undo_uses(tmp_path / "part-00000.parquet", 9, ())
    (row,) = pq.read_table(tmp_path / "part-00000.parquet").to_pylist()
    assert (row["consumed_at_version"], row["staleness"], row["episode_reward"]) == ([7], 3, 1.0)
    assert row["policy_versions"] == [5, 6, OBSERVED, 4, 7, 7]
    assert (row["forks"], row["prompt_length"]) == ([{"start": 2, "follows": 0}], len(given.prompt.token_ids))
    assert [turn["tools"] for turn in row["turns"]] == [["search", "?"], []], "no half of a character"
    assert Turn(**(row["turns"][1] | {"tools": ()})) == given.turns[1]


def test_siblings_of_a_bundle_share_their_prompt_and_a_bundle_can_go_on() -> None:
    given = rollouts()
    there = travelled(travelled(RolloutBundle(given)))
    assert there[0].prompt is there[1].prompt is not there[2].prompt
    for one, other in zip(given, travelled(RolloutBundle(there)), strict=True):
        assert_equal(one, other)
    assert not list(travelled(RolloutBundle([])))


def test_what_an_episode_worker_tells_arrives_whole() -> None:
    sampling = SamplingParams(7, stop=("x",))
    asked = [GenerationRequest(n, n // 2, prompt(n), 5 + n, sampling, 2, 9 * n) for n in range(3)]
    there = travelled(TurnBundle(asked))
    assert len(there) == 3 and not list(travelled(TurnBundle([])))
    for one, other in zip(asked, there, strict=True):
        assert_equal(replace(one, prompt=Prompt(one.prompt.prompt_id, "", one.prompt_ids)), other)
    wanted = [TurnWanted(r.rollout_id, r.tag, Payload(None, i)) for i, r in enumerate(asked)]
    given = EpisodeNews(wanted, describe([episode(), *rollouts()]), [GenerationFailure(9, "No room.", 2)], 4)
    assert travelled(given) == given != EpisodeNews()


def test_what_a_replica_tells_arrives_whole() -> None:
    given = Collected(
        describe(rollouts()),
        [GenerationFailure(9, "No room.", 2)],
        1.5,
        70,
        [0.25 * number for number in range(6)],
        [ChunkInfo(3, 0, 4, Payload(None, 0))],
        SpanBatch("generator-1", [], 0.5, 1.0, "here"),
    )
    assert travelled(given) == given != Collected()
    assert [info.epoch for info in travelled(given).finished] == [0, 1, 2, 0, 1, 2]
    assert travelled(Collected()) == Collected()


def test_requests_arrive_whole_and_siblings_share_their_prompt() -> None:
    sampling = SamplingParams(16, stop_token_ids=(3,))
    prompts = [prompt(0), prompt(1)]
    given = [GenerationRequest(i, i // 2, prompts[i // 2], 99 - i, sampling, epoch=i) for i in range(4)]
    there = travelled(Alike(given))
    for one, other in zip(given, there, strict=True):
        assert_equal(one, other)
    assert there[0].prompt is there[1].prompt is not there[2].prompt
    assert travelled(Alike(())) == ()


def test_the_record_writer_writes_what_this_process_would(tmp_path: Path) -> None:
    given = rollouts()[:2]

    def rows() -> list[RolloutRow]:
        trained = RolloutRow(0, 0, "", "trained", 1.0, reward=0.5, consumed_at_version=(3, 4), staleness=2, epoch=1)
        return [
            trained,
            RolloutRow(1, 0, "", "dropped", 2.0, drop_reason="stale"),
            RolloutRow(7, 3, "q", "failed", 3.0),
        ]

    write_part(tmp_path / "here.parquet", rows(), [*given, None])
    sent, places = travelled(Alike(rows())), [((0, 0),), ((0, 1),), None]
    RecordActor().write(str(tmp_path / "there.parquet"), sent, places, travelled(RolloutBundle(given)))
    here, there = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("here", "there"))
    assert here.num_rows == 3 and here.equals(there)
