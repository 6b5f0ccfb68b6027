"""Agents of their own processes train on a real Ray: OpenAI's client knows no more of the run than its address."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.episodes.adapters import verifiers_program
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from tests.loop import Finished
from tests.loop import run as local_run
from tests.ray_run import run

pytestmark = pytest.mark.usefixtures("ray_local")

FOLDER = Path(__file__).resolve().parents[1]
VERIFIERS = os.environ.get("VERIFIERS_PYTHON", "")  # as tests/unit/episodes/test_verifiers_program.py has it
SMALL = ("generator.max_completion_length=40", "generator.slots=16", "reward.kind=environment", "num_generations=2")


def assert_played(done: Finished, steps: int, batch: int) -> None:
    """Two turns an episode, with what the agent added between them, and the agent's own reward."""
    done.assert_ledger_whole()
    assert len(done.metrics) == steps and len(done.trained) == steps * batch
    for row in done.trained.itertuples():
        sampled = np.asarray(row.policy_versions) >= 0
        assert row.reward in (0.0, 0.5, 1.0) and sampled[0] and sampled[-1]
        assert np.count_nonzero(np.diff(sampled.astype(int)) == -1) == 1
        assert "2+3=" in row.response
        assert row.consumed_at_version[0] - np.asarray(row.policy_versions)[sampled].min() == row.staleness
    assert not done.summary["ledger"]["failed"]
    assert verify(done.folder) == []


@pytest.mark.parametrize(("steps", "batch"), [(3, 4), pytest.param(20, 2, marks=pytest.mark.thorough)])
def test_an_agent_with_openais_client_trains(
    tmp_path: Path, steps: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_aside(*_: object) -> None:
        raise AssertionError("the learner took cores from the episodes' workers")

    monkeypatch.setattr("asyncrlhf.cluster.ray_runtime.split_cores", set_aside)
    command = f"episode.agent_command={sys.executable} {FOLDER / 'agents.py'} sums"
    done = run(tmp_path, *SMALL, f"steps={steps}", f"batch_size={batch}", command)
    assert_played(done, steps, batch)


@pytest.mark.thorough
@pytest.mark.skipif(not VERIFIERS, reason="VERIFIERS_PYTHON names no interpreter that has verifiers")
@pytest.mark.timeout(900)
def test_a_taskset_of_verifiers_trains_twenty_steps(tmp_path: Path) -> None:
    """Each episode is a process of verifiers' own environment, which plays and scores a task by the run's address."""
    own = f"PYTHONPATH={FOLDER / 'verifiers_tasks'} TMPDIR={tmp_path}"  # uv leaves a lock in it
    command = f"episode.agent_command='env {own} {VERIFIERS} {verifiers_program.__file__} sums_taskset'"
    done = run(
        tmp_path / "run", *SMALL, "steps=20", "batch_size=2", command, "episode.concurrency=4",
        "episode.timeout_seconds=200", "stall_timeout_seconds=200",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert len(done.metrics) == 20 and len(done.trained) == 40 and not done.summary["ledger"]["failed"]
    assert all((np.asarray(versions) >= 0).all() for versions in done.trained.policy_versions), "one turn an episode"
    assert set(done.trained.reward) <= {0.0, 1.0}
    right = done.trained.response[done.trained.reward == 1.0]
    assert len(right) and right.str.contains("[02468]").all(), "verifiers' own score: the sum is even"
    assert verify(done.folder) == []


@pytest.mark.thorough
def test_an_agent_in_a_thread_trains_twenty_steps(tmp_path: Path) -> None:
    done = run(
        tmp_path, *SMALL, "steps=20", "batch_size=16", "episode.agent=tests.agents:sums", "episode.workers=2"
    )  # fmt: skip
    assert_played(done, 20, 16)


@pytest.mark.in_turn
@pytest.mark.more
def test_agents_that_fail_hang_or_leave_their_call_end_alone(tmp_path: Path) -> None:
    """An episode may end while a turn of it is being sampled."""
    done = run(
        tmp_path, *SMALL, "steps=6", "batch_size=8", "reward.kind=task", "episode.agent=tests.agents:sometimes",
        "episode.episode_seconds=3", "max_failure_fraction=1",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert done.summary["ledger"]["failed"]
    ends = [np.count_nonzero(np.diff(np.asarray(versions) >= 0)) for versions in done.trained.policy_versions]
    assert set(ends) == {0, 2}  # one turn, where the agent hung or left its second call, or two


def test_a_virtual_clock_has_no_agents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime=local has a virtual clock; allowed: runtime=ray"):
        local_run(tmp_path, "episode.agent=tests.agents:sums")
