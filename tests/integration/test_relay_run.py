"""``weights.transport=relay`` on Ray: replicas of pretended machines load what a neighbour holds, and holders die."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import ray

from asyncrlhf.cluster.ray_handles import RayGenerator
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from tests.ray_run import process_id, run

SMALL = (
    "batch_size=16", "num_generations=4", "generator.slots=8", "weights.audit_every=1", "weights.transport=relay",
    "weights.checksum=true", "eval_every=0", "async=sync",
)  # fmt: skip
pytestmark = [pytest.mark.more, pytest.mark.usefixtures("ray_local")]


def machines(monkeypatch: pytest.MonkeyPatch, hook: Any = None) -> dict[str, list[int]]:
    """Let replicas with odd and even numbers be on two machines. Returns the versions that each was sent, and tells
    ``hook`` of each call."""
    call, sent = RayGenerator.call, dict[str, list[int]]()

    async def told(self: RayGenerator, seconds: float, method: Any, /, *arguments: Any) -> Any:
        name = method.__name__
        if hook is not None:
            await hook(self, name, arguments)
        if name == "receive":
            sent.setdefault(self.name, []).append(arguments[0].version)
        if name == "host":
            return f"machine {int(self.name[-1]) % 2}"
        return await call(self, seconds, method, *arguments)

    monkeypatch.setattr(RayGenerator, "call", told)
    return sent


async def kill(handle: RayGenerator) -> None:
    os.kill(await process_id(handle.actor), signal.SIGKILL)


async def gone(handle: RayGenerator) -> None:
    """When Ray has noticed the end."""
    for _ in range(200):
        try:
            await handle.actor.__ray_call__.remote(lambda _: None)
        except ray.exceptions.RayError:
            return
        await asyncio.sleep(0.05)


@pytest.mark.in_turn
@pytest.mark.parametrize("delta", [pytest.param("none", marks=pytest.mark.thorough), "sparse"])
def test_a_version_enters_each_machine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delta: str) -> None:
    sent = machines(monkeypatch)
    done = run(tmp_path, *SMALL, "generator.replicas=4", "steps=6", f"weights.delta={delta}")
    done.assert_ledger_whole()
    assert sent == {name: list(range(7)) for name in ("generator-0", "generator-1")}
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)


@pytest.mark.in_turn
def test_replicas_pull_from_their_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = machines(monkeypatch)
    pull = ("async=async", "async.on_weight_update=pull", "weights.audit_every=3", "weights.delta=sparse")
    done = run(tmp_path, *SMALL, *pull, "generator.replicas=4", "steps=8")
    done.assert_ledger_whole()
    assert set(sent) == {"generator-0", "generator-1"}, "a version enters each machine once"
    assert sent["generator-0"] == sent["generator-1"] and sent["generator-0"][-1] == 8
    assert all(abs(row["mismatch_kl"]) < 1e-6 and row["staleness_max"] <= 2 for row in done.metrics)


@pytest.mark.in_turn
@pytest.mark.parametrize("when", ["receive", pytest.param("load", marks=pytest.mark.thorough)])
def test_a_holder_dies_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """As it receives version 2; or once it holds it, before a neighbour has mapped its memory."""
    struck: list[str] = []

    async def strike(handle: RayGenerator, name: str, arguments: Any) -> None:
        if struck or name != when:
            return
        if when == "receive" and handle.name == "generator-0" and arguments[0].version == 2:
            struck.append(handle.name)
            await kill(handle)
        if when == "load" and handle.name == "generator-2" and arguments[0] == 0:  # the first that it would map
            (holder,) = (h for h in handles if h.name == "generator-0")
            struck.append(holder.name)
            await kill(holder)
            await gone(holder)

    handles = weakref.WeakSet[RayGenerator]()  # or what is being restarted at the end would outlive the run
    born = RayGenerator.__init__

    def note(self: RayGenerator, *arguments: Any, **keywords: Any) -> None:
        born(self, *arguments, **keywords)
        handles.add(self)

    monkeypatch.setattr(RayGenerator, "__init__", note)
    machines(monkeypatch, strike)
    done = run(tmp_path, *SMALL, "generator.replicas=4", "steps=8", "stall_timeout_seconds=300")
    done.assert_ledger_whole()
    assert struck == ["generator-0"] and len(done.metrics) == 8
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_loads_from_a_neighbours_memory(tmp_path: Path, workers: int) -> None:
    done = run(
        tmp_path, "experiment=vllm_cpu", *SMALL, "weights.delta=sparse", "steps=4", "generator.replicas=2",
        f"generator.vllm.tensor_parallel_size={workers}", "stall_timeout_seconds=300", "generator.slots=16",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert len(done.metrics) == 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("weights.disk_path=/tmp/x",), "is used only by weights.transport=disk, not by relay"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(["weights.transport=relay", *overrides])
