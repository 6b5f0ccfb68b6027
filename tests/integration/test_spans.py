"""The timeline of whole runs on the virtual clock: spans last what their work costs and tile each part's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.actors.episodes import StepLanes
from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.report.load import load_run
from asyncrlhf.report.timeline import section
from tests.integration.test_local_loop import interrupt_after, kill_at
from tests.loop import FAKE, meddle, run

TRAIN = 0.1  # seconds of a step
ROLLOUTS = 4 * 16  # of four steps


def spans_of(folder: Path) -> pd.DataFrame:
    files = sorted((folder / "spans").glob("part-*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def lanes_of(folder: Path) -> dict[str, pd.DataFrame]:
    """Each part's spans in the order of time."""
    rows = spans_of(folder)
    return {str(part): lane.sort_values(["start", "end"], kind="stable") for part, lane in rows.groupby("part")}


def assert_tiled(lane: pd.DataFrame) -> None:
    """Spans follow each other without a gap and without overlap."""
    np.testing.assert_allclose(lane.start.to_numpy()[1:], lane.end.to_numpy()[:-1], atol=1e-9)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The latency, in seconds, that a fake engine drew for each rollout."""
    seen: dict[int, float] = {}
    original = FakeEngine._draft

    def draft(self: FakeEngine, request: Any) -> Any:
        made = original(self, request)
        seen[request.rollout_id] = made.latency
        return made

    monkeypatch.setattr(FakeEngine, "_draft", draft)
    return seen


def test_spans_last_what_was_drawn_and_fill_the_time_of_every_part(tmp_path: Path, drawn: dict[int, float]) -> None:
    options = (*FAKE, "steps=4", "generator.replicas=2", "async.mode=sync", f"learner.virtual_step_seconds={TRAIN}")
    done = run(tmp_path / "a", *options)
    lanes = lanes_of(tmp_path / "a")
    assert set(lanes) == {"generator-0", "generator-1", "learner-0", "publisher", "reward-0"}
    for lane in lanes.values():
        assert_tiled(lane)
    wall = max(lane.end.max() for lane in lanes.values())
    for part, lane in lanes.items():
        assert lane.start.min() == 0 and lane.end.max() == pytest.approx(wall, abs=1e-9), part
        busy, waiting = lane[lane.kind != "wait"], lane[lane.kind == "wait"]
        assert busy.busy_seconds.sum() + (waiting.end - waiting.start).sum() == pytest.approx(wall, abs=1e-9)
    # Each replica is at work until the slowest of its rollouts of a version is made.
    rows = done.trained.assign(version=[versions[0] for versions in done.trained.policy_versions])
    for name in ("generator-0", "generator-1"):
        lane = lanes[name]
        found = lane[(lane.kind == "decode") & (lane.start < lanes["learner-0"].query("kind == 'train'").end.max())]
        mine = rows[rows.generator_id == name]
        assert list(found.version) == sorted(set(mine.version)) == [0, 1, 2, 3]
        for span in found.itertuples():
            ids = mine[mine.version == span.version].rollout_id
            assert span.end - span.start == pytest.approx(max(drawn[i] for i in ids), abs=1e-6)
            assert span.rollouts == len(ids)
        assert list(lane[lane.kind == "load"].version) == [1, 2, 3, 4]
    train = lanes["learner-0"].query("kind == 'train'")
    np.testing.assert_allclose(train.end - train.start, TRAIN, atol=1e-9)
    assert list(train.version) == [0, 1, 2, 3] and list(train.rollouts) == [16] * 4
    # Transfers run beside the steps, in a lane of their own; a snapshot comes before each.
    assert list(lanes["publisher"].query("kind == 'transfer'").version) == [1, 2, 3, 4]
    assert set(lanes["learner-0"].kind) == {"train", "snapshot", "wait"}
    assert list(lanes["learner-0"].query("kind == 'snapshot'").version) == [1, 2, 3, 4]
    assert lanes["reward-0"].query("kind == 'score'").rollouts.sum() == ROLLOUTS + 8  # the evaluation at the end
    np.testing.assert_allclose(train.end, [row["wall_time"] for row in done.metrics], atol=1e-9)

    run(tmp_path / "b", *options)
    pd.testing.assert_frame_equal(spans_of(tmp_path / "a"), spans_of(tmp_path / "b"))


def test_steps_of_environments_lie_in_lanes_by_the_names_of_their_tools(tmp_path: Path) -> None:
    """Of sixteen episodes at a time four are drawn: a step lasts a second, and two of three call the tool."""
    options = (
        *FAKE, "steps=4", "episode.environment=tests.worlds:SlowSums", "reward.kind=environment",
        "generator.max_completion_length=40",
    )  # fmt: skip
    run(tmp_path / "a", *options)
    lanes = {part: lane for part, lane in lanes_of(tmp_path / "a").items() if part.startswith("episode-")}
    assert set(lanes) == {f"episode-0-{number}" for number in range(StepLanes.MOST)}
    for lane in lanes.values():
        assert_tiled(lane)
        steps = lane[lane.kind != "wait"]
        assert set(steps.kind) <= {"step", "step next"} and len(steps) > 4
        np.testing.assert_allclose(steps.end - steps.start, 1.0, atol=1e-6)
    kinds = pd.concat([lane.kind for lane in lanes.values()]).value_counts()
    assert kinds["step next"] > kinds["step"] > 0
    page = section(load_run(tmp_path / "a"))
    assert ">next</th>" in page and ">environment</th>" in page

    run(tmp_path / "b", *options)
    pd.testing.assert_frame_equal(spans_of(tmp_path / "a"), spans_of(tmp_path / "b"))


def test_the_lane_of_a_killed_replica_ends_and_those_of_eight_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddle(monkeypatch, kill_at(0.6))  # type: ignore[arg-type]
    run(tmp_path, *FAKE, "steps=16", "generator.replicas=8", "max_restarts=0")
    lanes = lanes_of(tmp_path)
    assert sum(part.startswith("generator-") for part in lanes) == 8
    killed, others = lanes.pop("generator-0"), [lane for part, lane in lanes.items() if part.startswith("generator-")]
    assert 0.2 < killed.end.max() <= 0.6
    assert_tiled(killed)
    for lane in others:
        assert_tiled(lane)
        assert lane.end.max() > 1.2
    # A row a replica, step and change of what it does: not one a message.
    assert all(len(lane) < 16 * 8 for lane in others)


def test_the_lane_of_a_replica_that_is_started_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle(monkeypatch, kill_at(0.6))  # type: ignore[arg-type]
    done = run(tmp_path, *FAKE, "steps=16", "generator.replicas=2")
    lane = lanes_of(tmp_path)["generator-0"]
    assert (lane.end.to_numpy()[:-1] <= lane.start.to_numpy()[1:] + 1e-9).all()
    after = lane[(lane.kind == "decode") & (lane.start > 0.6)]
    mine = done.rollouts[(done.rollouts.generator_id == "generator-0") & (done.rollouts.generated_at > 0.6)]
    assert after.rollouts.sum() > 0.8 * len(mine) > 0, "all but those that it had under way at 0.6 s"
    assert (after.version >= 1).all(), "it was started with the weights of its time"


def test_a_resumed_run_counts_nothing_twice(tmp_path: Path) -> None:
    options = (*FAKE, "generator.replicas=2", "steps=8", "checkpoint.resume=auto", "checkpoint.every=2")
    interrupt_after(tmp_path, 5, *options)
    before = sorted((tmp_path / "spans").glob("*.parquet"))
    # What a killed run leaves behind: rows beyond the checkpoint that the next one goes on from.
    (tmp_path / "spans" / "part-00999.parquet").write_bytes(before[-1].read_bytes())
    tokens = sorted((tmp_path / "rollout_tokens").glob("*.parquet"))[-1]
    (tmp_path / "rollout_tokens" / "steps-0000006-0000007-rank-0.parquet").write_bytes(tokens.read_bytes())
    done = run(tmp_path, *options)
    assert set(before) < set((tmp_path / "spans").glob("*.parquet")), "a resumed run writes new parts"
    for part, lane in lanes_of(tmp_path).items():
        overlap = lane.end.to_numpy()[:-1] - lane.start.to_numpy()[1:]
        assert (overlap <= 1e-9).all(), part
    train = lanes_of(tmp_path)["learner-0"].query("kind == 'train'")
    assert list(train.version) == list(range(8))
    np.testing.assert_allclose(train.end - train.start, TRAIN, atol=1e-9)
    rows = pd.read_parquet(tmp_path / "rollout_tokens")
    assert list(rows.groupby("step").size()) == [16] * 8
    assert not rows.duplicated(["step", "rollout_id"]).any()
    assert done.summary["ledger"]["adds_up"]


def test_the_tokens_can_be_switched_off(tmp_path: Path) -> None:
    run(tmp_path, *FAKE, "steps=2", "logging.rollout_tokens=0")
    assert not (tmp_path / "rollout_tokens").exists()


def test_the_recorded_tokens_are_those_of_the_rollouts(tmp_path: Path) -> None:
    """By the real engine: text, tokens, versions and the generator's log-probs agree with ``rollouts/*.parquet``."""
    done = run(tmp_path, "steps=3", "batch_size=32", "generator.slots=32", "logging.rollout_tokens=5")
    rows = pd.read_parquet(tmp_path / "rollout_tokens")
    assert list(rows.groupby("step").size()) == [5] * 3
    trained = done.trained.set_index("rollout_id")
    for row in rows.itertuples():
        other = trained.loc[row.rollout_id]
        assert "".join(row.tokens) == other.response and row.prompt == other.prompt
        assert len(row.tokens) == len(row.response_ids) == len(other.behavior_logprobs)
        assert list(row.policy_versions) == list(other.policy_versions) and row.reward == pytest.approx(other.reward)
        np.testing.assert_array_equal(row.behavior_logprobs, other.behavior_logprobs)
        assert row.step - 1 in other.consumed_at_version
    fresh = rows[rows.step == 1]
    drift = np.concatenate([p - b for p, b in zip(fresh.proximal_logprobs, fresh.behavior_logprobs, strict=True)])
    assert np.abs(drift).max() < 1e-3, "the first step's tokens were sampled by the policy that trains on them"
