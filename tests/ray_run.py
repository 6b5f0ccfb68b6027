"""Runs training runs on a real Ray for tests: finds the actors' processes, meddles with them, checks that they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from asyncrlhf.cluster.ray_handles import RayGenerator
from asyncrlhf.orchestrator.controller import Controller
from tests import loop
from tests.loop import Finished

# Four logical CPUs serve the tests' Ray: with threads=0 a generator asks for none of them.
RAY = ("runtime=ray", "generator.threads=0", "task.heldout_size=2", "stall_timeout_seconds=60")
PARTS = ("ray::GeneratorActor", "ray::LearnerActor", "ray::AnnotatorActor", "ray::EpisodeActor")

Hook = Callable[..., Awaitable[None]]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def part_processes() -> list[psutil.Process]:
    """The processes of all actors of the runs that this process, or a command that it started, has under way."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if is_alive(process) and " ".join(process.cmdline()).startswith(PARTS):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(condition: Callable[[], object], missing: str, seconds: float = 60.0) -> None:
    """Look until ``condition`` holds; fails with what was ``missing``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {missing}")
        time.sleep(0.05)


async def until(condition: Callable[[], object], missing: str, seconds: float = 60.0) -> None:
    """As :func:`wait_until`, beside a run's loops."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {missing}")
        await asyncio.sleep(0.02)


def run(folder: Path, *overrides: str) -> Finished:
    """One run on the Ray of the fixture ``ray_local``; afterwards none of its actors is left, however it ended.
    A run without that fixture would start a Ray of its own, in any of the test processes, with all cores and stores."""
    assert ray.is_initialized(), "this test needs the fixture ray_local"
    try:
        return loop.run(folder, *RAY, *overrides)
    finally:
        wait_until(lambda: not part_processes(), "the end of every actor's process")


def before(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, hook: Hook) -> None:
    """Await ``hook(self, *arguments)`` before each call of an asynchronous method."""
    original = getattr(owner, method)

    async def wrapped(self: Any, *arguments: Any) -> Any:
        await hook(self, *arguments)
        return await original(self, *arguments)

    monkeypatch.setattr(owner, method, wrapped)


def before_call(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, hook: Hook) -> None:
    """Await ``hook(self, *arguments)`` before each call of the worker's method of that name through ``owner``."""
    original = owner.call  # type: ignore[attr-defined]

    async def call(self: Any, seconds: float, asked: Callable[..., Any], /, *arguments: Any) -> Any:
        if asked.__name__ == method:
            await hook(self, *arguments)
        return await original(self, seconds, asked, *arguments)

    monkeypatch.setattr(owner, "call", call)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    """A list that will hold the controller of every run from now on."""
    seen: list[Controller] = []

    async def note(controller: Controller) -> None:
        seen.append(controller)

    before(monkeypatch, Controller, "run", note)
    return seen


async def process_id(actor: Any) -> int:
    """The process behind an actor's handle."""
    number: int = await actor.__ray_call__.remote(lambda self: os.getpid())
    return number


async def strike(actor: Any, signal_number: int) -> int:
    """Send a signal to an actor's process; a kill has been carried out when this returns."""
    number = await process_id(actor)
    process = psutil.Process(number)
    os.kill(number, signal_number)
    if signal_number == signal.SIGKILL:
        await until(lambda: not is_alive(process), f"the death of process {number}")
    return number


def replica_of(controller: Controller, handle: RayGenerator) -> Any:
    """What the controller knows of the replica behind a handle."""
    return next(r for r in controller.state.replicas if r.handle is handle)
