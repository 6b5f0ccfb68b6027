"""Episodes under a real Ray whose parts die, freeze or are interrupted: nothing is lost, nothing is played twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from asyncrlhf.cluster.ray_handles import RayGenerator, RayLearner
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.orchestrator.rollouts.episodes import Episodes
from tests.chaos.test_ray_chaos import Command
from tests.integration.test_episodes import assert_whole
from tests.loop import FAKE
from tests.ray_run import before, run, strike, until, watch
from tests.worlds import Blocks, Exits, Rare

SMALL = (*FAKE, "generator.max_completion_length=40", "logging.progress=plain", "episode.workers=2")
SCORED = "reward.kind=environment"


def world(name: str) -> tuple[str, str]:
    return f"episode.environment=tests.worlds:{name}", SCORED


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def begun_again_of(controller: Controller) -> set[int]:
    """The rollouts whose episodes were begun again, or given up."""
    assert controller._episodes is not None
    return set(controller._episodes._attempts)


@pytest.mark.usefixtures("ray_local")
def test_killed_parts_lose_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An episode worker dies while it plays, and a replica while it samples turns."""
    controllers, held, turns = watch(monkeypatch), set[int](), set[int]()

    async def note_lost(episodes: Episodes, lost: Sequence[int]) -> None:
        held.update(lost)

    async def in_a_step(learner: RayLearner, *_: Any) -> None:
        controller = controllers[0]
        state, table = controller.state, controller.state.episodes
        if state.version == 2:
            worker: Any = controller._runtime.episodes[0]
            await until(lambda: worker.name in table.at.values(), "episodes at the worker")
            await strike(worker.actor, signal.SIGKILL)
            await until(lambda: worker.restarts == 1 and not controller._episodes._down, "the worker's return")  # type: ignore[union-attr]

        if state.version == 5:  # the steps that follow can train on them
            await until(lambda: turns.isdisjoint(state.ledger.live_ids("generating")), "end of the replica's episodes")

    async def in_a_turn(handle: RayGenerator, *_: Any) -> None:
        state = controllers[0].state
        replica = next(replica for replica in state.replicas if replica.handle is handle)
        if state.version >= 4 and not turns:
            turns.update(replica.in_flight)
            await strike(handle.actor, signal.SIGKILL)

    before(monkeypatch, RayLearner, "train", in_a_step)
    before(monkeypatch, RayGenerator, "submit_turns", in_a_turn)
    before(monkeypatch, Episodes, "_take_back", note_lost)
    done = run(tmp_path, *SMALL, *world("Rare"), "steps=8", "generator.replicas=2")
    assert_whole(done)
    assert done.summary["ledger"]["trained"] == 8 * 16
    assert held and turns
    begun_again, trained = begun_again_of(controllers[0]), set(done.trained.rollout_id)
    assert begun_again & trained, "the worker's episodes began again"
    assert begun_again & trained <= held, "the replica's did not"
    assert (turns - held) & trained, "a turn was sampled again, and its episode went on"
    parts = set(pd.concat(map(pd.read_parquet, (done.folder / "spans").glob("*.parquet"))).part)
    assert {"episode-0-0", "episode-1-0"} <= parts, "the timeline has the environments of both workers"
    told = said(capsys)
    assert "episode-0 died: " in told and "episodes start again." in told


def strange_ids(kind: type[Rare], rollouts: Any) -> set[int]:
    return {i for i in rollouts if kind.is_strange(request_seed(0, i))}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options", "cause"),
    [
        (Exits, (), "Its episode worker died 3 times with it: episode-"),
        (Blocks, ("stall_timeout_seconds=6",), "Its episode worker died 3 times with it: episode-"),
    ],
    ids=["exits", "blocks"],
)
@pytest.mark.usefixtures("ray_local")
def test_who_ends_its_worker_again_and_again_fails_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[Rare],
    options: tuple[str, ...],
    cause: str,
) -> None:
    controllers = watch(monkeypatch)

    async def has_failed(*_: Any) -> None:
        """The last steps wait for it: a run may be over before an episode has ended three workers, and all that were
        with it at two deaths are played again one by one."""
        if (state := controllers[0].state).version >= 4:
            await until(lambda: state.ledger.counts()["failed"], "an episode that ended its worker three times", 180)

    before(monkeypatch, RayLearner, "train", has_failed)
    done = run(tmp_path, *SMALL, *world(kind.__name__), *options, "steps=6", "async.max_staleness=6")  # drops none
    assert_whole(done)
    rows = done.rollouts
    failed = rows[rows.state == "failed"]
    assert set(failed.rollout_id) == strange_ids(kind, rows[rows.state != "dropped"].rollout_id)
    assert len(failed), "no episode was meant to end its worker"
    assert all(cause in reason for reason in done.summary["ledger"]["failed"])
    told = said(capsys)
    if kind is Blocks:
        assert "did not respond for 2 s, asked for collect" in told
        assert "were waiting for episode.environment=tests.worlds:Blocks, which may block its event loop." in told
    assert not controllers[0].state.episodes.deaths.keys() & set(done.trained.rollout_id)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_threads_that_never_end_cost_their_episodes_and_at_last_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    controllers = watch(monkeypatch)
    done = run(
        tmp_path, *SMALL, *world("Stuck"), "steps=40", "episode.timeout_seconds=1", "episode.workers=1",
        "max_failure_fraction=1", "async.max_staleness=4",
    )  # fmt: skip
    assert_whole(done)
    failed = done.summary["ledger"]["failed"]
    assert sum(failed.values()) > 100
    assert all("step took longer than episode.timeout_seconds=1" in reason for reason in failed)
    worker: Any = controllers[0]._runtime.episodes[0]
    assert worker.restarts >= 1
    assert "calls of tools that do not end" in said(capsys)


@pytest.mark.in_turn
@pytest.mark.more
def test_an_interrupted_run_of_episodes_goes_on(tmp_path: Path, ray_local: Any) -> None:
    """Ctrl-C while episodes are under way; the same command begins them again and trains each step once."""
    folder, address = tmp_path / "run", ray_local.get_runtime_context().gcs_address
    options = (*SMALL, *world("Rare"), "steps=12", "generator.replicas=2", "checkpoint.resume=auto")
    command = Command(folder, *options, f"ray.address={address}")
    try:
        command.until_steps(4)
        command.signal(signal.SIGINT)
        assert command.ends(60) == 130, command.output.read_text()
    finally:
        command.clean()
    first = json.loads((folder / "summary.json").read_text())
    assert first["exit_reason"] == "interrupted" and first["ledger"]["adds_up"] and first["ledger"]["left"] > 0
    model = "model.path=tiny"  # as the command's
    done = run(folder, *options, model, f"ray.address={address}")
    assert_whole(done)
    assert [row["step"] for row in done.metrics] == list(range(1, 13))
    assert sum(map(len, done.trained.consumed_at_version)) == 12 * 16
