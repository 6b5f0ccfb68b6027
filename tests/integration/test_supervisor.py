"""Runs that stand still, on the virtual clock: who is named, what is replaced, what is left alone, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.annotator import RewardWorker
from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cli.main import main
from asyncrlhf.cluster.handles import within
from asyncrlhf.cluster.local_runtime import LocalRuntime
from asyncrlhf.errors import ReplicaError, StallError
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut, Measured
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.orchestrator.supervisor import Supervisor
from asyncrlhf.records.write import status
from asyncrlhf.records.write.run_lock import RunLock
from tests.loop import FAKE, meddle, run

SAID = ("logging.progress=plain",)
LIMIT = "stall_timeout_seconds=10"


def hang(monkeypatch: pytest.MonkeyPatch, worker: type, method: str, call: int) -> None:
    """The ``call``-th call of a worker's method never ends."""
    original, calls = getattr(worker, method), []

    @wraps(original)
    def hanging(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            return asyncio.get_running_loop().create_future()
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(worker, method, hanging)


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("method", "call", "sentence"),
    [
        ("train", 4, r"asked for train 2\d s ago\. The learner is in its step 3, begun 2\d s ago\."),
        ("save", 1, r"asked for save 2\d s ago\. The learner waits for the checkpoint of step 4, begun 2"),
        ("transfer", 2, r"asked for transfer 2\d s ago"),
    ],
)
def test_a_learner_that_hangs_ends_the_run_under_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    call: int,
    sentence: str,
) -> None:
    hang(monkeypatch, LearnerWorker, method, call)
    with pytest.raises(StallError, match=r"No progress for 2\d s: learner-0 has not answered, " + sentence):
        run(tmp_path, *FAKE, *SAID, LIMIT, "steps=20", "checkpoint.every=4")
    assert "No progress for 1" in words(capsys), "it was said before"


def test_a_resumed_run_whose_learner_does_not_load_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*FAKE, LIMIT, "checkpoint.resume=auto", "checkpoint.every=2")
    run(tmp_path, *options, "steps=2")
    hang(monkeypatch, LearnerWorker, "load", 1)
    with pytest.raises(StallError, match=r"learner-0 .* load 2\d s ago\. The run takes up its checkpoint\."):
        run(tmp_path, *options, "steps=4")


def freeze(runtime: LocalRuntime, seconds: float, *, silent: bool = True) -> None:
    """After so many seconds the generator makes no token more; ``silent``: nor does it give a sign of life."""
    generator: Any = runtime.generators[0]

    async def no_ping(limit: float) -> None:
        await within(limit, generator.name, "ping", asyncio.get_running_loop().create_future())

    def strike() -> None:
        generator.worker.has_work = lambda: False
        if silent:
            generator.ping = no_ping

    asyncio.get_running_loop().call_later(seconds, strike)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("silent", "cause"),
    [(True, "did not respond for 3.33 s."), (False, "generated no token for 2")],
    ids=["frozen", "lives and does nothing"],
)
@pytest.mark.more_but("frozen")
def test_a_generator_that_stands_still_is_replaced_and_its_rollouts_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], silent: bool, cause: str
) -> None:
    meddle(monkeypatch, lambda runtime: freeze(runtime, 0.3, silent=silent))
    done = run(tmp_path, *FAKE, *SAID, LIMIT, "steps=20", "task.heldout_size=1")
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == 20 * 16
    said = words(capsys)
    assert re.search(r"generator-0 is at version \d with \d+ rollouts in flight \(ids \d+, \d+", said), "who holds what"
    assert said.index("No progress") < said.index(f"Cause: generator-0 {cause}")
    assert "generator-0 is back" in said


def test_a_generator_that_freezes_in_the_first_evaluation_is_replaced_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meddle(monkeypatch, lambda runtime: freeze(runtime, 0.01))
    done = run(tmp_path, *FAKE, *SAID, LIMIT, "steps=2")
    assert done.summary["exit_reason"] == "done" and done.summary["heldout_accuracy"]["before"] is not None
    said = words(capsys)
    assert "A held-out evaluation is under way" in said
    assert "did not respond for 3.33 s, asked for generate" in said and "(ids -1, -2, -3" in said


SLOW = ("generator.fake.latency_median=30", "generator.fake.latency_sigma=0", "generator.slots=1")


def test_what_is_slow_and_moves_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer takes three times the limit, and an evaluation eight of them."""
    done = run(tmp_path, *FAKE, *SAID, LIMIT, *SLOW, "steps=2", "eval_every=1", "batch_size=4")
    assert done.metrics[-1]["wall_time"] > 8 * 30
    assert "No progress" not in words(capsys)


def test_a_run_that_was_stopped_itself_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-Z and fg do: the clock has jumped far over the limit, and everybody is well."""
    train = LearnLoop._train

    async def jumping(self: LearnLoop, *arguments: Any) -> Any:
        if self.state.version == 3:
            await asyncio.sleep(1.0)  # no token is made any more
            asyncio.get_running_loop()._jumping.now += 1000.0  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)  # answers of other processes come a little later
        return await train(self, *arguments)

    monkeypatch.setattr(LearnLoop, "_train", jumping)
    done = run(tmp_path, *FAKE, *SAID, LIMIT, "steps=5", "async.mode=sync")  # no generator is at work meanwhile
    assert done.metrics[-1]["wall_time"] > 1000 and "No progress" not in words(capsys)


@pytest.mark.parametrize(
    ("silent", "replaced"), [(1, False), (2, False), (99, True)], ids=["awake", "slow to wake", "frozen"]
)
def test_a_part_that_could_not_answer_while_the_run_was_stopped_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], silent: int, replaced: bool
) -> None:
    """Ctrl-Z comes between a ping and its answer, and the ping's time has passed when fg wakes the run. If the whole
    machine was stopped, the part may take a while to wake, too. As on a real clock, no two things are at one time."""
    pings, ask = [], Supervisor._ask

    def later(self: Supervisor, name: str) -> None:
        ask(self, name)
        asyncio.get_running_loop()._jumping.now += 1e-3  # type: ignore[attr-defined]

    monkeypatch.setattr(Supervisor, "_ask", later)

    def strike(runtime: LocalRuntime) -> None:
        generator: Any = runtime.generators[0]

        async def late(limit: float) -> None:
            pings.append(limit)
            answer = asyncio.get_running_loop().create_future()
            if len(pings) == 1:
                asyncio.get_running_loop()._jumping.now += 1000.0  # type: ignore[attr-defined]
            if len(pings) > silent:
                answer.set_result(None)
            await within(limit, generator.name, "ping", answer)

        generator.ping = late

    meddle(monkeypatch, strike)
    done = run(tmp_path, *FAKE, *SAID, LIMIT, *SLOW, "steps=2", "batch_size=4")
    done.assert_ledger_whole()
    said = words(capsys)
    assert len(pings) >= 2
    assert ("did not respond" in said) == ("is back" in said) == replaced


def test_a_reward_worker_that_lives_and_hangs_is_asked_anew_after_twice_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hang(monkeypatch, RewardWorker, "annotate", 4)
    done = run(tmp_path, *FAKE, *SAID, LIMIT, "steps=20")
    done.assert_ledger_whole()
    assert done.summary["ledger"]["failed"] == {}
    said = words(capsys)
    assert "reward-0 is alive but did not answer, asked for annotate 2" in said and "(ids " in said
    times = [0.0, *(row["wall_time"] for row in done.metrics)]
    assert 10 < max(later - earlier for earlier, later in pairwise(times)) < 25


def test_a_signal_while_the_learner_hangs_ends_in_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = LearnLoop._step

    async def struck(self: LearnLoop, *arguments: Any) -> None:
        if self.state.version == 3:
            os.kill(os.getpid(), signal.SIGINT)
        await step(self, *arguments)

    monkeypatch.setattr(LearnLoop, "_step", struck)
    hang(monkeypatch, LearnerWorker, "train", 4)
    overrides = [*FAKE, *SAID, LIMIT, f"run_dir={tmp_path}", "runtime=local", "logging.wandb=disabled"]
    assert main(["train", *overrides, "steps=8", "checkpoint.every=2", "task.heldout_size=2"]) == 130
    said = words(capsys)
    assert "writing a checkpoint within stall_timeout_seconds=10" in said
    assert "learner-0 has not answered, asked for train 1" in said
    assert "No checkpoint of step 3 could be written; the last one is of step 2." in said
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == ["step-00000002"]
    assert "StallError" in (tmp_path / "error.txt").read_text()


@pytest.mark.parametrize("own", [True, False], ids=["a failed run", "a whole run"])
def test_parts_that_do_not_close_hide_no_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("first")

    async def not_closing(self: LocalRuntime) -> None:
        await close(self)
        raise OSError("second")

    close = LocalRuntime.close
    if own:
        monkeypatch.setattr(LearnLoop, "_step", broken)
    monkeypatch.setattr(LocalRuntime, "close", not_closing)
    overrides = [*FAKE, f"run_dir={tmp_path}", "runtime=local", "logging.wandb=disabled", "logging.progress=none"]
    assert main(["train", *overrides, "steps=1"]) == 1
    first = "ZeroDivisionError: first" if own else "OSError: second"
    assert capsys.readouterr().err.startswith(f"asyncrlhf: {first}.")
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == f"failed: {first}"
    text = (tmp_path / "error.txt").read_text()
    assert text.index(first) <= text.index("OSError: second")


# --- asyncrlhf status


def told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["status", str(run_dir)]) == 0
    return words(capsys)


def test_the_status_of_a_run_at_work_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that writes it changes nothing of what the run does."""
    seen: list[str] = []
    step, options = LearnLoop._step, (*FAKE, "steps=6", "async.max_staleness=2")

    async def looking(self: LearnLoop, *arguments: Any) -> None:
        if self.state.version == 4:
            while (status.read_status(tmp_path / "a") or {}).get("step") != 4:
                await asyncio.sleep(0)
            seen.append(told(tmp_path / "a", capsys))
        await step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(status, "SECONDS", 0.001)
        patch.setattr(LearnLoop, "_step", looking)
        watched = run(tmp_path / "a", *options)
    assert f"process {os.getpid()} on " in seen[0] and " trains. Step 4 of 6; published version " in seen[0]
    assert "The learner waits for the batch of step 4" in seen[0] and "generator-0 is at version" in seen[0]
    plain = run(tmp_path / "b", *options)
    for key in ("wall_time", "staleness_mean", "reward_mean", "buffer_size", "rollouts_in_flight", "dropped"):
        assert [row[key] for row in watched.metrics] == [row[key] for row in plain.metrics], key
    assert told(tmp_path / "a", capsys).startswith(f"{tmp_path}/a: done after step 6 of 6. Rollouts: 96 trained,")
    assert not (tmp_path / "a" / status.STATUS_FILE).exists()


def test_the_status_of_a_process_that_is_gone_frozen_or_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {
        "doing": "trains", "step": 3, "steps": 9, "published_version": 3, "buffer": 4, "in_flight": 5,
        "waiting_to_be_issued_again": 0, "seconds_without_movement": 2.0, "restarts": {"reward-0": 1},
        "waits": ["learner-0 is at work, asked for train 2 s ago."],
    }  # fmt: skip

    def write(written: float, answered: float) -> None:
        now = status.time.time()
        ages = {"written": now - written, "answered": now - answered}
        (tmp_path / status.STATUS_FILE).write_text(json.dumps({"pid": 7, "host": "h", **ages, **figures}))

    (tmp_path / "config.yaml").touch()
    lock = RunLock(tmp_path)
    assert "is beginning or ending" in told(tmp_path, capsys)
    write(0, 0)
    said = told(tmp_path, capsys)
    assert "process 7 on h trains." in said and "Restarts: reward-0 1. learner-0 is at work" in said
    write(0, 90)
    assert "process 7 on h lives, but its event loop has not answered for 1 min 30 s" in told(tmp_path, capsys)
    write(90, 90)
    assert "process 7 on h does not answer: it has been frozen for 1 min 30 s" in told(tmp_path, capsys)
    lock.release()
    assert "process 7 on h is gone, without a summary: it was killed 1 min 30 s ago" in told(tmp_path, capsys)
    (tmp_path / status.STATUS_FILE).unlink()
    assert "its process ended without a summary" in told(tmp_path, capsys)


def test_before_the_first_progress_nothing_has_stood_still() -> None:
    """The clock of a machine that has been up for hours says nothing of a run that is only starting."""
    starting: Any = SimpleNamespace(now=lambda: 16228.4, last_progress=RunState.last_progress)
    nothing: Any = None
    assert Supervisor(starting, nothing, nothing, (), tuple).still == 0.0


def test_a_folder_that_is_no_run_has_no_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["a", "b"], ["--live"], [str(tmp_path)], [str(tmp_path / "nothing")]):
        assert main(["status", *given]) == 2
        error = capsys.readouterr().err
        assert error.startswith("asyncrlhf: ") and error.count("\n") == 1


def test_a_stall_in_an_evaluation_is_not_said_to_be_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch of the next step is complete; the learner waits for the evaluation of the last one."""
    measure, calls = HeldOut.measure, []

    async def slow(self: HeldOut, *arguments: Any) -> Measured | None:
        calls.append(arguments)
        if len(calls) == 2:
            await asyncio.sleep(15)
        return await measure(self, *arguments)

    monkeypatch.setattr(HeldOut, "measure", slow)
    run(tmp_path, *FAKE, *SAID, LIMIT, "steps=6", "eval_every=2")
    said = words(capsys)
    assert re.search(r"No progress for 1\d s\. The learner waits for the evaluation of step 2, begun 1\d s ago", said)
    assert "waits for the batch" not in said


def test_a_hang_in_an_evaluation_is_one_death_under_its_own_cause(tmp_path: Path) -> None:
    """The end of the process that was replaced is no death of the replica that replaced it."""
    frozen = ("generator.fake.latency_median=86400", "generator.fake.latency_sigma=0", "max_restarts=2")
    with pytest.raises(ReplicaError, match=r"died after 2 restarts .*Cause: generator-0 did not answer gener"):
        run(tmp_path, *FAKE, *frozen, "generator.fake.tail_probability=1", "stall_timeout_seconds=1e6")
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    died = [line for line in map(json.loads, lines) if line["event"] == "died"]
    assert len(died) == 3 and all("did not answer generate" in line["reason"] for line in died), died
