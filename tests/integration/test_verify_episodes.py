"""``asyncrlhf verify`` of episodes: a run of them holds, and each lie about their turns is found and named."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrlhf.actors.worker import describe
from asyncrlhf.orchestrator.learning.meters import _episodes
from asyncrlhf.records.read.episodes import read_turns
from asyncrlhf.records.read.verify import examine, verify
from asyncrlhf.records.write.rollout_rows import ROLLOUT_SCHEMA, TURN
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import OBSERVED, Prompt, Rollout, RolloutGroup
from tests.loop import FAKE, run

Row = dict[str, Any]
PROMPT = Prompt("p", "1+1=", np.arange(3))


def as_episode(row: Row) -> Row:
    """The row with two observed tokens in the middle of its response, where it forks, and a tool called there."""
    versions, logprobs, by = row["policy_versions"], row["behavior_logprobs"], row["generator_id"]
    middle, total = len(versions) // 2, len(versions) + 2
    forks = [Fork(middle, 0)] if middle else []
    if not middle:  # of a single token
        turns = [Turn(0, len(versions), by)]
    else:
        versions = [*versions[:middle], OBSERVED, OBSERVED, *versions[middle:]]
        logprobs = [*logprobs[:middle], 0.0, 0.0, *logprobs[middle:]]
        turns = [
            Turn(0, middle, by, ("calculator",), 0.25, failures=row["rollout_id"] % 2),
            Turn(middle + 2, total, by),
        ]
    arrays = {"policy_versions": versions, "behavior_logprobs": logprobs}
    return (
        row
        | arrays
        | {
            "turns": [vars(turn) for turn in turns],
            "generator_id": "episodes-0",
            "forks": [vars(fork) for fork in forks],
        }
    )


def as_rollout(row: Row) -> Rollout:
    turns, forks = tuple(Turn(**turn) for turn in row["turns"]), tuple(Fork(**fork) for fork in row["forks"])
    versions, logprobs = (np.array(row[name]) for name in ("policy_versions", "behavior_logprobs"))
    return Rollout(row["rollout_id"], 0, PROMPT, versions, logprobs, versions, "stop", turns=turns, forks=forks)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas, with records as if a worker had run each rollout as an episode of two turns."""
    folder = tmp_path_factory.mktemp("episodes") / "run"
    run(
        folder, *FAKE, "generator.replicas=2", "async.max_staleness=2", "steps=6", "generator.fake.latency_max_ratio=50"
    )
    plain = [row for path in sorted(folder.glob("rollouts/*")) for row in pq.read_table(path).to_pylist()]
    assert all(row["turns"] == [] and row["episode_reward"] is None for row in plain)
    taken = defaultdict[int, list[Rollout]](list)
    for path in folder.glob("rollouts/*"):
        rows = [as_episode(row) if row["policy_versions"] else row for row in pq.read_table(path).to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), path)
        for row in rows:
            for version in row["consumed_at_version"]:
                taken[version].append(as_rollout(row))
    journal = [json.loads(line) for line in (folder / "journal.jsonl").open()]
    worker = {"replica": "episodes-0", "version": OBSERVED}
    told = [line | worker if line["event"] == "started" else line for line in journal]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in told))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for row in metrics:
        assert "turns_mean" not in row, "the run itself had no episodes"
        version = row["step"] - 1
        row |= _episodes(version, [RolloutGroup(0, tuple(describe(taken[version])))])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def test_a_run_of_episodes_holds_and_counts_sampled_tokens_alone(honest: Path) -> None:
    found = examine(honest)
    assert found.broken == []
    rows = [row for path in honest.glob("rollouts/*") for row in pq.read_table(path).to_pylist()]
    sampled = sum(version != OBSERVED for row in rows for version in row["policy_versions"])
    assert found.checked["tokens"] == sampled < sum(len(row["policy_versions"]) for row in rows)
    metrics = [json.loads(line) for line in (honest / "metrics.jsonl").open()]
    assert all(row["turns_mean"] <= 2 and 0 < row["observed_fraction"] < 0.5 for row in metrics)
    assert all(0 < row["forks_mean"] <= 1 for row in metrics)
    assert all(0 < row["tool_seconds_mean"] <= 0.25 and 0 < row["tool_failures_mean"] < 1 for row in metrics)
    assert all(row["turn_staleness_first_mean"] >= row["turn_staleness_last_mean"] for row in metrics)
    assert any(row["turn_staleness_first_mean"] > row["turn_staleness_last_mean"] for row in metrics)


def turn(number: int, **values: Any) -> Callable[[Row], None]:
    return lambda row: row["turns"][number].update(values)


def at(which: Callable[[Row], int], **values: Any) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        for name, value in values.items():
            row[name][which(row)] = value

    return change


def gap(row: Row) -> int:
    return int(row["turns"][0]["end"])


def moved(which: int, by: int) -> Callable[[Row], None]:
    """The versions of one turn."""

    def change(row: Row) -> None:
        here = slice(row["turns"][which]["start"], row["turns"][which]["end"])
        row["policy_versions"][here] = [version + by for version in row["policy_versions"][here]]

    return change


LIES: tuple[tuple[str, Callable[[Row], None]], ...] = (
    ("turn that is empty or leaves their response", turn(1, end=10**6)),
    ("turn that is empty or leaves their response", turn(0, start=-1)),
    ("turn that is empty or leaves their response", turn(0, end=0)),
    ("turns that overlap or are out of order", lambda row: row["turns"].reverse()),
    ("turns that overlap or are out of order", lambda row: row["turns"][1].update(start=gap(row) - 1)),
    ("an observed token within a turn", lambda row: row["turns"][0].update(end=gap(row) + 1)),
    ("an observed token and no turns", lambda row: row["turns"].clear()),
    ("a sampled token outside of their turns", lambda row: row["turns"].pop()),
    ("a sampled token outside of their turns", at(gap, policy_versions=3)),
    ("an observed token with a log-prob", at(gap, behavior_logprobs=-0.5)),
    ("another number of log-probs", lambda row: row["behavior_logprobs"].pop()),
    ("a token older than the one before it", moved(0, 1)),
    ("turn of a replica without weights", turn(1, generator_id="generator-7")),
    ("turn with a version that its replica was not given", moved(1, 9)),
    ("turn with a token older than its replica's weights", moved(0, -3)),
    ("another staleness than their tokens", moved(0, -1)),
    ("a branch that begins within a turn", lambda row: row["forks"][0].update(start=gap(row) + 1)),
    ("a branch that follows no token", lambda row: row["forks"][0].update(follows=row["prompt_length"] + gap(row) - 1)),
    ("a branch that follows no token", lambda row: row["forks"][0].update(follows=-2)),
    ("forks_mean is not what", lambda row: row["forks"].clear()),
    ("turns_mean is not what", lambda row: row["turns"].append(row["turns"][-1])),
    ("tool_seconds_mean is not what", turn(0, seconds=9.0)),
    ("tool_failures_mean is not what", turn(0, failures=9)),
    ("turn_staleness_first_mean is not what", moved(0, -1)),
    ("turn_staleness_last_mean is not what", moved(1, 1)),
)


@pytest.mark.parametrize(("sentence", "change"), LIES, ids=[f"{i}-{said}" for i, (said, _) in enumerate(LIES)])
def test_a_lie_about_turns_is_found(sentence: str, change: Callable[[Row], None], honest: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(honest, tmp_path / "run"))
    for path in sorted(folder.glob("rollouts/*"), reverse=True):
        rows = pq.read_table(path).to_pylist()
        wanted = [
            r for r in rows if r["state"] == "trained" and len(r["turns"]) == 2 and min(r["policy_versions"][:1]) > 2
        ]
        if wanted:
            change(wanted[-1])
            pq.write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), path)
            break
    assert any(sentence in said for said in verify(folder)), verify(folder)


def test_a_later_turn_may_be_of_another_replica_with_older_weights() -> None:
    versions = np.array([4, OBSERVED, 3, 5, 5, OBSERVED, 5])  # two episodes
    lengths, said = np.array([3, 4]), "rollouts {ids} have a token older than the one before it."

    def turns(second: str) -> pa.ChunkedArray:
        rows = [[Turn(0, 1, "g-0"), Turn(2, 3, second)], [Turn(0, 2, "g-0"), Turn(3, 4, "g-0")]]
        return pa.chunked_array([pa.array([[vars(one) for one in row] for row in rows], pa.list_(TURN))])

    assert read_turns(turns("g-0"), lengths, versions).faults[said].tolist() == [0]
    assert read_turns(turns("g-1"), lengths, versions).faults[said].tolist() == []
