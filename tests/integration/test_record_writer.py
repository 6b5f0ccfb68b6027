"""Records of a Ray run: written by an actor, while the controller never holds a rollout's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cluster.ray_runtime import RayRuntime
from tests import ray_run
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
    done = ray_run.run(tmp_path, *FAKE, "steps=8", "logging.flush_every=32")
    assert fetched == []
    done.assert_ledger_whole()
    assert len(list((tmp_path / "rollouts").glob("*.parquet"))) > 3
    for row in done.trained.itertuples():
        assert row.prompt and row.response is not None
        assert len(row.policy_versions) == len(row.behavior_logprobs) > 0
