"""Dead, hanging and interrupted parts under a real Ray: nothing is lost, nothing hangs, whoever failed is named."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cli.status import status_lines
from asyncrlhf.cluster.ray_handles import RayAnnotator, RayGenerator, RayLearner
from asyncrlhf.errors import ReplicaError
from tests.loop import FAKE, Finished
from tests.loop import run as local_run
from tests.ray_run import (
    before,
    before_call,
    is_alive,
    part_processes,
    replica_of,
    run,
    strike,
    until,
    wait_until,
    watch,
)

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def read_summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def assert_each_step_trained_once(done: Finished, steps: int) -> None:
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == steps * 16
    uses = list(itertools.chain.from_iterable(done.trained.consumed_at_version))
    assert [uses.count(version) for version in range(steps)] == [16] * steps


@pytest.mark.usefixtures("ray_local")
def test_killed_parts_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """generator-0 dies at work, generator-1 in the midst of a transfer, a reward worker and the record writer
    in between."""
    controllers, struck, records = watch(monkeypatch), [], []

    async def at_work(learner: RayLearner, *_: Any) -> None:
        state = controllers[0].state
        if state.version == 2:
            busy = state.replicas[0]
            await until(lambda: busy.in_flight, "work at generator-0")
            struck.append(await strike(busy.handle.actor, KILL))
            await until(lambda: busy.restarts == 1 and busy.takes_work, "generator-0's return")
        if state.version == 6:
            struck.append(await strike(controllers[0]._runtime.rewards[0].actor, KILL))
        if state.version == 7:
            records.append(await strike(controllers[0]._runtime.records.actor, KILL))
        if state.version == 12:
            other = state.replicas[1]
            await until(lambda: other.restarts == 1 and other.takes_work, "generator-1's return")

    async def in_transfer(generator: RayGenerator, ticket: Any) -> None:
        if ticket.version >= 8 and generator.name == "generator-1" and len(struck) == 2:
            struck.append(await strike(generator.actor, KILL))

    before(monkeypatch, RayLearner, "train", at_work)
    before_call(monkeypatch, RayGenerator, "receive", in_transfer)
    done = run(tmp_path, *FAKE, "steps=20", "generator.replicas=2", "logging.progress=plain", "logging.flush_every=16")
    assert len(struck) == 3 and len(records) == 1
    assert_each_step_trained_once(done, 20)
    assert done.trained.staleness.max() <= 2
    assert set(done.trained[done.trained.consumed_at_version.str[0] >= 16].generator_id) == {
        "generator-0",
        "generator-1",
    }
    said = capsys.readouterr().out
    assert "generator-0 is back" in said and "generator-1 is back" in said


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.usefixtures("ray_local")
def test_a_killed_rank_brings_the_run_back_to_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 dies while rank 0 waits for it in a step; generators stay as they are."""
    controllers = watch(monkeypatch)
    struck: list[int] = []

    async def in_a_step(learner: RayLearner, *_: Any) -> None:
        state = controllers[0].state
        if state.version == 4 and not struck:
            await until(lambda: state.saved_version == 3, "the checkpoint of step 3, which is written beside step 4")
            struck.append(await strike(learner.ranks[1].actor, KILL))

    before(monkeypatch, RayLearner, "train", in_a_step)
    done = run(tmp_path, *FAKE, "steps=7", "learner.ranks=2", "checkpoint.every=3")
    assert len(struck) == 1
    assert_each_step_trained_once(done, 7)
    state = controllers[0].state
    assert state.epoch == 1 and [r.restarts for r in state.replicas] == [0]
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    (back,) = [line for line in lines if line["event"] == "rollback"]
    assert (back["version"], back["to"], back["epoch"]) == (4, 3, 1)
    older = done.trained[done.trained.epoch == 0]
    assert all(max(row.policy_versions) <= 3 for row in older.itertuples())
    assert set(done.trained.epoch) == {0, 1}


@pytest.mark.thorough  # test_killed_parts_lose_nothing kills at work and in a transfer; schedules use up restarts
@pytest.mark.usefixtures("ray_local")
def test_the_only_generator_comes_back_until_its_restarts_are_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed idle, then in the midst of a transfer, then at work: the third death is one too many."""
    controllers, struck = watch(monkeypatch), []  # a strike counts from its start: it takes a while, and calls repeat

    async def idle(learner: RayLearner, *_: Any) -> None:
        state = controllers[0].state
        if state.version == 1 and not struck:
            assert not state.replicas[0].in_flight, "in async.mode=sync the generators rest while the learner trains"
            struck.append("idle")
            await strike(state.replicas[0].handle.actor, KILL)

    async def in_transfer(generator: RayGenerator, ticket: Any) -> None:
        if ticket.version == 3 and len(struck) == 1:
            struck.append("in transfer")
            await strike(generator.actor, KILL)

    async def at_work(generator: RayGenerator) -> None:
        state = controllers[0].state
        if state.version == 5 and replica_of(controllers[0], generator).in_flight and len(struck) == 2:
            struck.append("at work")
            await strike(generator.actor, KILL)

    before(monkeypatch, RayLearner, "train", idle)
    before_call(monkeypatch, RayGenerator, "receive", in_transfer)
    before(monkeypatch, RayGenerator, "collect", at_work)
    with pytest.raises(ReplicaError, match="no generator is left: generator-0 died after 2 restarts") as failure:
        run(tmp_path, *FAKE, "steps=10", "async.mode=sync", "max_restarts=2")
    assert failure.value.exit_code == 1
    summary = read_summary(tmp_path)
    assert summary["exit_reason"].startswith("failed: no generator is left")
    assert summary["ledger"]["adds_up"] and summary["ledger"]["trained"] == 5 * 16


@pytest.mark.thorough  # test_frozen_parts_are_named_and_replaced freezes one as well
@pytest.mark.usefixtures("ray_local")
def test_a_generator_that_hangs_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    controllers, struck = watch(monkeypatch), []

    async def in_transfer(generator: RayGenerator, ticket: Any) -> None:
        if ticket.version == 3 and generator.name == "generator-1" and not struck:
            struck.append(psutil.Process(await strike(generator.actor, STOP)))

    async def wait_for_it(learner: RayLearner, *_: Any) -> None:
        if controllers[0].state.version == 5:
            slow = controllers[0].state.replicas[1]
            await until(lambda: slow.restarts == 1 and slow.takes_work, "generator-1's return")

    before_call(monkeypatch, RayGenerator, "receive", in_transfer)
    before(monkeypatch, RayLearner, "train", wait_for_it)
    done = run(
        tmp_path, *FAKE, "steps=10", "generator.replicas=2", "weights.timeout_seconds=5", "logging.progress=plain"
    )
    assert_each_step_trained_once(done, 10)
    said = " ".join(capsys.readouterr().out.split())
    assert "generator-1 gave no answer within 5 s during a weight transfer" in said and "generator-1 is back" in said
    wait_until(lambda: not is_alive(struck[0]), "the end of the hanging process")


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("method", ["receive", pytest.param("load", marks=pytest.mark.thorough)])
def test_a_transport_without_a_control_line_does_not_hang_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """On the virtual clock: a replica that never answers, though no sender speaks to it, leaves in the time-out."""
    hung: list[GeneratorWorker] = []
    original = getattr(GeneratorWorker, method)

    @wraps(original)
    def hang(worker: GeneratorWorker, *arguments: Any) -> Any:
        if worker.name == "generator-1" and (worker in hung or (not hung and worker.engine.version == 2)):
            hung.append(worker)
            return asyncio.get_running_loop().create_future()
        return original(worker, *arguments)

    monkeypatch.setattr(GeneratorWorker, method, hang)
    done = local_run(
        tmp_path, *FAKE, "steps=80", "generator.replicas=2", "weights.timeout_seconds=5", "logging.progress=plain"
    )
    assert_each_step_trained_once(done, 80)
    said = " ".join(capsys.readouterr().out.split())
    assert len(hung) == 1 and said.count("generator-1 did not") == 1 and said.count("generator-1 is back") == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_frozen_parts_are_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped one after the other, none of them dead: the only generator in the first evaluation, the only reward
    worker at a call, then the learner in its step, which starts again from version 0: there is no checkpoint; at last
    the record writer, which the end of the run waits for."""
    controllers, struck = watch(monkeypatch), {}
    status: list[str] = []

    async def stop(where: str, actor: Any) -> None:
        if where not in struck:
            struck[where] = psutil.Process()  # the first of several calls
            struck[where] = psutil.Process(await strike(actor, STOP))

    async def evaluating(generator: RayGenerator, *_: Any) -> None:
        if controllers[0].state.version == 0 and "evaluating" not in struck:
            await stop("evaluating", generator.actor)

    async def scoring(worker: RayAnnotator, *_: Any) -> None:
        if controllers[0].state.version >= 3:
            await stop("scoring", worker.actor)

    async def training(learner: RayLearner, *_: Any) -> None:
        step = controllers[0].state.version
        if step >= 6 and "scoring" in struck and "training" not in struck:
            await stop("training", learner.ranks[0].actor)
            here = f"Step {step} of 10"
            await until(lambda: here in "".join(status_lines(tmp_path, time.time())), f"the status {here!r}")
            status.extend(status_lines(tmp_path, time.time()))
        elif step == 9:
            await stop("writing", controllers[0]._runtime.records.actor)

    before(monkeypatch, RayGenerator, "generate", evaluating)
    before(monkeypatch, RayAnnotator, "annotate", scoring)
    before(monkeypatch, RayLearner, "train", training)
    settings = (
        "steps=10",
        "stall_timeout_seconds=9",
        "logging.progress=plain",
        "eval_every=0",
        "logging.flush_every=16",
    )
    done = run(tmp_path, *FAKE, *settings)
    said = " ".join(capsys.readouterr().out.split())
    assert list(struck) == ["evaluating", "scoring", "training", "writing"]
    assert "Cause: generator-0 did not respond for 3 s, asked for generate" in said and "(ids -1, -2)" in said
    assert said.count("No progress for") >= 2 and said.count("generator-0 is back") == 1, said
    assert "reward-0 did not respond for 3 s, asked for annotate" in said
    assert "Held-out greedy accuracy at version 0" in said, "the replica that came back was asked again"
    assert status[0].endswith("trains.") and "Restarts: generator-0 1, reward-0 1." in status, status
    wait_until(lambda: not [p for p in struck.values() if is_alive(p)], "the end of the stopped processes")
    assert "The record writer did not respond for 3 s. Replacing it." in said
    assert re.search(r"learner-0 did not respond for 3 s, asked for \w+ \d+ s ago", said)
    assert re.search(r"The learner is back: from step [678] to the checkpoint of step 0", said)
    assert controllers[0].state.epoch == 1
    assert_each_step_trained_once(done, 10)


async def test_what_actors_start_ends_with_them(ray_local: Any) -> None:
    class Starter:
        """It starts a process, as an engine does. Sent to Ray by value, which spares it this module's imports."""

        def start(self) -> int:
            import subprocess

            return subprocess.Popen(["sleep", "600"]).pid

    actors = [ray_local.remote(Starter).options(num_cpus=0).remote() for _ in range(2)]
    started = [psutil.Process(await asyncio.wait_for(actor.start.remote(), 60)) for actor in actors]
    ray_local.kill(actors[0])
    await strike(actors[1], KILL)
    await until(lambda: not any(map(is_alive, started)), "the end of what the actors started", 10)


class Command:
    """``asyncrlhf train`` in a process group of its own, as a terminal starts it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}-output.txt"
        # steps= here, not at the call: a resumed run must have the same.
        arguments = [
            "train", f"run_dir={folder}", "logging.wandb=disabled", "logging.progress=plain", "task.heldout_size=2",
            *FAKE, *overrides,
        ]  # fmt: skip
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrlhf", *arguments],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder.parent,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
            )  # fmt: skip
        self.family: set[psutil.Process] = set()

    def note_family(self) -> None:
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def until_steps(self, count: int) -> None:
        path = self.folder / "metrics.jsonl"

        def enough() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return path.exists() and path.read_text().count("\n") >= count

        wait_until(enough, f"step {count} of the command", 90)
        self.note_family()

    def signal(self, number: int) -> None:
        """Ctrl-C as the terminal sends it, to every process of the group; anything else to the command alone."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def ends(self, seconds: float) -> int:
        """The exit code; afterwards no process of Ray's is left."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the command did not end within {seconds:g} s: {self.output.read_text()}")
        wait_until(lambda: not [p for p in self.family if is_alive(p)], "the end of Ray's processes")
        return code

    def clean(self) -> None:
        """Whatever a failed test left."""
        for process in [*self.family, psutil.Process(self.process.pid)] if self.process.poll() is None else self.family:
            if is_alive(process):
                process.kill()


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.clean()


def start(commands: list[Command], folder: Path, *overrides: str) -> Command:
    commands.append(Command(folder, *overrides))
    return commands[-1]


@pytest.mark.thorough  # test_endings sends the signals on Ray too, and test_exact_resume goes on after kills
def test_an_interrupted_command_resumes_with_its_totals(
    tmp_path: Path, commands: list[Command], ray_local: Any
) -> None:
    """Interrupted once, with a Ray of its own; resumed on the tests' Ray, stopped by SIGTERM while a generator hangs,
    and cut off by an interrupt on top; then resumed to the end. The checkpoint that all of it stands on is the first
    interrupt's."""
    folder = tmp_path / "run"
    options = ("steps=60", "async.mode=one_step", "checkpoint.resume=auto")
    command = start(commands, folder, *options)
    command.until_steps(10)
    command.signal(signal.SIGINT)
    assert command.ends(60) == 130, command.output.read_text()
    first = read_summary(folder)
    assert first["exit_reason"] == "interrupted" and first["ledger"]["adds_up"]
    assert (folder / f"checkpoints/step-{first['steps']:08d}/controller.json").is_file()

    address = ray_local.get_runtime_context().gcs_address
    command = start(commands, folder, *options, f"ray.address={address}")
    command.until_steps(first["steps"] + 2)
    (generator,) = [p for p in part_processes() if p.cmdline()[0].startswith("ray::GeneratorActor")]
    generator.send_signal(STOP)
    command.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the rollouts that its checkpoint has to hold
        command.process.wait(3)
    command.signal(signal.SIGINT)
    assert command.ends(60) == 130, command.output.read_text()
    assert read_summary(folder)["ledger"]["adds_up"]

    done = run(folder, *FAKE, *options)
    assert_each_step_trained_once(done, 60)
    assert [row["step"] for row in done.metrics] == list(range(1, 61))
    assert set(done.trained.staleness) == {0, 1}
