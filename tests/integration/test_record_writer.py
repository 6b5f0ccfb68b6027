"""Records of a Ray run: written by an actor, while the controller never holds a rollout's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.cluster.ray_runtime import RayRuntime
from tests import ray_run
from tests.integration.test_spans import assert_tiled, lanes_of
from tests.loop import FAKE


def test_the_controller_fetches_no_rollout_and_every_row_is_whole(
    ray_local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    fetch = RayRuntime.fetch

    async def counted(self: RayRuntime, payloads: Sequence[Any]) -> Any:
        fetched.append(len(payloads))
        return await fetch(self, payloads)

    monkeypatch.setattr(RayRuntime, "fetch", counted)
    done = ray_run.run(tmp_path, *FAKE, "steps=8", "logging.flush_every=32", "generator.replicas=2")
    assert fetched == []
    done.assert_ledger_whole()
    assert len(list((tmp_path / "rollouts").glob("*.parquet"))) > 3
    for row in done.trained.itertuples():
        assert row.prompt and row.response is not None
        assert len(row.policy_versions) == len(row.behavior_logprobs) > 0
    assert_timeline(tmp_path, done.metrics)
    rows = pd.read_parquet(tmp_path / "rollout_tokens")
    assert list(rows.groupby("step").size()) == [16] * 8 and not rows.duplicated(["step", "rollout_id"]).any()
    responses = done.trained.set_index("rollout_id").response
    assert ["".join(row.tokens) for row in rows.itertuples()] == list(responses[rows.rollout_id])


def assert_timeline(folder: Path, metrics: list[dict[str, Any]]) -> None:
    """Every process told what it did until the end, without overlap, by the clock that the metrics go by."""
    lanes = lanes_of(folder)
    assert set(lanes) == {"generator-0", "generator-1", "learner-0", "publisher", "reward-0"}
    wall = metrics[-1]["wall_time"]
    for part, lane in lanes.items():
        assert_tiled(lane)
        assert lane.start.min() == 0 and lane.end.max() > wall and (lane.clock_error == 0).all(), part
        assert (lane.busy_seconds <= lane.end - lane.start + 1e-9).all()
    train = lanes["learner-0"].query("kind == 'train'")
    assert list(train.version) == list(range(8)) and set(train.rollouts) == {16}
    # The controller sees a step's end when the answer has come.
    late = np.array([row["wall_time"] for row in metrics]) - train.end.to_numpy()
    assert (late > 0).all() and np.median(late) < 0.2
    assert lanes["publisher"].query("kind == 'transfer'").version.max() == 8
    assert all(8 in set(lanes[f"generator-{i}"].query("kind == 'load'").version) for i in range(2))
    assert lanes["reward-0"].query("kind == 'score'").rollouts.sum() >= 8 * 16
