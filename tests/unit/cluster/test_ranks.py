"""Which of several ranks' failures is the cause; what a rank waits for that has no machine any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.cluster import ray_placement, ray_runtime
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.placement import Seat
from asyncrlhf.cluster.ray_calls import DEATH_SECONDS, a_rank, first, together
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.errors import LearnerLostError, ReplicaError


async def after(seconds: float, outcome: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def timed(work: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """What comes of it, an exception too, and the seconds that it took."""

    async def main() -> tuple[Any, float]:
        try:
            found = await work
        except Exception as error:
            found = error
        return found, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_all_answers_in_order() -> None:
    assert timed(together([after(2, "a"), after(1, "b")])) == (["a", "b"], 2)
    assert timed(first([after(2, "a"), after(1, "b")])) == ("a", 2)


def test_a_death_is_the_cause_of_what_its_peers_raise() -> None:
    broken, dead = RuntimeError("connection closed by peer"), LearnerLostError("learner-1 died")
    assert timed(together([after(1, broken), after(3, dead), after(99, "never")])) == (dead, 3)
    assert timed(together([after(99, "never"), after(3, dead)])) == (dead, 3)


def test_an_error_of_the_code_is_raised_whether_the_others_answer_or_hang() -> None:
    wrong = ValueError("a batch like that")
    assert timed(together([after(1, wrong), after(2, "fine")])) == (wrong, 2)
    assert timed(together([after(1, wrong), after(999, "hangs")])) == (wrong, 1 + DEATH_SECONDS)


def test_what_a_rank_does_not_answer_is_its_loss() -> None:
    with pytest.raises(LearnerLostError, match="learner-0 did not answer"), a_rank():
        raise ReplicaError("learner-0 did not answer train within 5 s")
    with pytest.raises(ValueError, match="its own"), a_rank():
        raise ValueError("its own")


def test_ranks_of_a_lost_node_wait_for_room_and_then_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])
    seats = {"learner-0": Seat(cpus=2, gpus=1)}
    runtime = RayRuntime.__new__(RayRuntime)
    renewed: list[str] = []

    async def renew(name: str) -> None:
        renewed.append(name)

    placer: Any = SimpleNamespace(stands=lambda name: next(looks), renew=renew, plan=SimpleNamespace(seats=seats))
    runtime._placer = placer
    monkeypatch.setattr(ray_runtime, "wait_for_true_nodes", lambda: None)
    monkeypatch.setattr(ray_runtime, "ROOM_SECONDS", 0.04)
    monkeypatch.setattr(ray_runtime, "free_in_ray", lambda: "8 of 8 CPUs, 0 of 0 GPUs")
    asyncio.run(runtime._wait_for_room("learner-0", 60.0))
    assert next(looks, None) is None, "it looked until a node had room"
    assert renewed == ["learner-0"], "its devices were reserved on a node that lives"
    placer.stands = lambda name: False
    with pytest.raises(ReplicaError, match=r"learner-0 cannot be restarted .* needs 2 CPUs and 1 GPUs; free in Ray: 8"):
        asyncio.run(runtime._wait_for_room("learner-0", 0.02))


def test_a_node_that_ray_still_believes_alive_is_waited_for_until_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = (open_port.getsockname()[1], closed.getsockname()[1])
        lives, lost = ({"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for port in ports)
        closed.close()
        looks = iter([True, True, False])
        monkeypatch.setattr(ray_placement, "LOOK_SECONDS", 0.001)
        monkeypatch.setattr(
            ray_placement.ray, "nodes", lambda: [{**lives, "Alive": True}, {**lost, "Alive": next(looks)}]
        )
        ray_placement.wait_for_true_nodes()
        assert next(looks, None) is None, "a part would have been placed on the lost node"
