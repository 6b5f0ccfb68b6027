"""The record writer's handle without Ray: what becomes of its answers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from asyncrlhf.cluster import ray_calls, ray_records
from asyncrlhf.cluster.calls import keep_calls
from asyncrlhf.cluster.ray_records import RayRecords
from asyncrlhf.errors import ReplicaError, failure_sentence


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[RayRecords, list[Future[Any]]]:
    """A handle whose actor answers when the test says so: the futures of its calls."""
    calls: list[Future[Any]] = []

    def write(*_: Any) -> Any:
        calls.append(Future())
        return SimpleNamespace(future=lambda: calls[-1])

    records = RayRecords(5.0, 60.0)
    records.actor = SimpleNamespace(write=SimpleNamespace(remote=write))
    monkeypatch.setattr(ray_records.ray, "kill", lambda actor: None)
    return records, calls


class Answer:
    """Of Ray, to a ping: the number of a process; None never comes."""

    def __init__(self, number: int | None) -> None:
        self.answer: Future[int] = Future()
        if number is not None:
            self.answer.set_result(number)

    def future(self) -> Future[int]:
        return self.answer

    def __await__(self) -> Generator[Any, None, int]:
        return asyncio.wrap_future(self.answer).__await__()


def test_no_wait_for_a_file_outlives_the_run(asked: tuple[RayRecords, list[Future[Any]]]) -> None:
    records, calls = asked
    written, lost = (records.write_part(Path("part"), [], []) for _ in range(2))
    calls[0].set_result(None)
    records.close()
    assert written.result(0) is None
    with pytest.raises(ReplicaError, match="the record writer ended before it wrote a file"):
        lost.result(0)
    calls[1].set_result(None)  # too late, and no error of a thread of Ray's


def test_its_death_for_good_is_told_as_such(asked: tuple[RayRecords, list[Future[Any]]]) -> None:
    records, calls = asked
    lost = records.write_part(Path("part"), [], [])
    calls[0].set_exception(RayActorError())
    with pytest.raises(ReplicaError, match="the record writer died: The actor"):
        lost.result(0)


def test_its_own_exception_is_told_in_one_line_that_names_it(
    asked: tuple[RayRecords, list[Future[Any]]], tmp_path: Path
) -> None:
    """Ray's message of such an exception is a traceback, whose first line names only a process."""
    records, calls = asked
    lost = records.write_part(Path("part"), [], [])
    calls[0].set_exception(RayTaskError("write", "Traceback ...\nMemoryError", MemoryError()))
    with pytest.raises(MemoryError) as caught:
        lost.result(0)
    assert failure_sentence(caught.value) == "MemoryError (in the record writer)"


def test_of_several_that_wait_for_a_frozen_one_one_replaces_it(
    asked: tuple[RayRecords, list[Future[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replacement counts as a restart, of which it has few."""
    records, calls = asked
    killed: list[Any] = []
    said: list[str] = []

    def ping() -> Answer:
        return Answer(1 if killed else None)

    def replace(actor: Any, *, no_restart: bool) -> None:
        assert not no_restart, "Ray repeats its calls only where it starts it again"
        killed.append(actor)
        for call in calls:
            call.set_result(None)

    async def wait_for(file: Future[None]) -> None:
        await records.written([file], said.append)

    async def both() -> None:
        keep_calls()
        files = [records.write_part(Path("part"), [], []) for _ in range(2)]
        await asyncio.wait_for(asyncio.gather(*map(wait_for, files)), 60)

    records._seconds = 0.05
    records.actor.ping = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=ping))
    monkeypatch.setattr(ray_records.ray, "kill", replace)
    asyncio.run(both())
    assert len(killed) == 1 and said == ["The record writer did not respond for 0.05 s. Replacing it."]


def test_a_frozen_process_is_ended_at_once(
    asked: tuple[RayRecords, list[Future[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives a process seconds to end itself, in which a frozen one does nothing and the run stands still."""
    records, calls = asked
    monkeypatch.setattr(ray_records.ray, "kill", lambda *_, **__: pytest.fail("left to Ray"))
    with subprocess.Popen(["sleep", "600"]) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        answers = [Answer(frozen.pid), Answer(None), Answer(2)]  # of its start, when it is frozen, of its successor
        records.actor.ping = SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda: answers.pop(0)),
        )
        records._process = records._asked()
        records._seconds = 0.05
        file = records.write_part(Path("part"), [], [])

        async def ended() -> None:
            keep_calls()
            waiting = asyncio.create_task(records.written([file], lambda said: None))
            while frozen.poll() is None:
                await asyncio.sleep(0.01)
            calls[0].set_result(None)
            await waiting

        asyncio.run(asyncio.wait_for(ended(), 60))
        assert frozen.returncode == -signal.SIGKILL and records._process.result(0) == 2


def test_a_death_after_which_ray_started_it_again_is_told(
    asked: tuple[RayRecords, list[Future[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with its cause if that was memory; and what is ended when it freezes is the process that writes now."""
    records, calls = asked
    said: list[str] = []
    ended: list[int] = []
    monkeypatch.setattr(ray_calls, "memory_kills", lambda: ray_calls._Kills.known + 1)
    monkeypatch.setattr(ray_records.os, "kill", lambda process, _: ended.append(process))
    records._process = Answer(7).future()

    async def write(*processes: int) -> None:
        files = [records.write_part(Path("part"), [], []) for _ in processes]
        for call, process in zip(calls[-len(files) :], processes, strict=True):
            call.set_result(process)
        await records.written(files, said.append)

    for processes in ((7,), (7, 8), (8, 8)):
        asyncio.run(write(*processes))
    memory = "Memory was short; it needs less with a smaller logging.flush_every."
    assert said == [f"The record writer died and was started again. {memory}"]
    records._kill()
    assert ended == [8]
