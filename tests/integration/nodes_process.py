"""Run by test_nodes in a process of its own: runs on a cluster whose nodes come, are drained, and are lost meanwhile.

Prints one JSON object a run: what it left behind.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from asyncrlhf.cluster import ray_runtime
from asyncrlhf.cluster.forked_workers import ForkedWorkers
from asyncrlhf.cluster.ray_handles import RayLearner
from asyncrlhf.orchestrator import drains
from asyncrlhf.orchestrator.replicas import recovery
from tests import loop
from tests.loop import Finished
from tests.processes import ray_files
from tests.ray_run import before, until, watch

PREEMPTION = 2  # Ray's reason of a drain
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
RAY = ("runtime=ray", "task.heldout_size=2")
Meddle = Callable[[Any, RayLearner], Awaitable[None]]  # of a controller and its learner, before each step


class Keeper:
    def there(self) -> bool:
        return True


class Nodes:
    """A head, and the nodes beside it."""

    def __init__(self, head_cpus: int, nodes: int) -> None:
        head = {**NODE, "num_cpus": head_cpus, "resources": {"keeper": 1}, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(wait=False, **NODE) for _ in range(nodes)]
        self.cluster.wait_for_nodes()

    def run(self, folder: Path, meddle: Meddle, *words: str) -> Finished:
        with pytest.MonkeyPatch.context() as patch:
            controllers = watch(patch)

            async def meddled(learner: RayLearner, *_: Any) -> None:
                await meddle(controllers[-1], learner)

            before(patch, RayLearner, "train", meddled)
            done = loop.run(folder, *loop.FAKE, *RAY, f"ray.address={self.cluster.address}", *words)
        done.assert_ledger_whole()
        return done


def told(part: str, done: Finished, **more: Any) -> None:
    found = {"steps": len(done.metrics), "reason": done.summary["exit_reason"], "ledger": done.summary["ledger"]}
    print(json.dumps({"name": part, **found, **more}), flush=True)


def drain(node: str, seconds: float) -> None:
    worker: Any = ray._private.worker.global_worker
    worker.gcs_client.drain_node(node, PREEMPTION, "the machine goes", int((time.time() + seconds) * 1000))


def drained(folder: Path, nodes: Nodes, part: str) -> None:
    """The node of a part is drained at version 4."""
    seen, kept = dict[str, Any](), list[Any]()

    async def meddle(controller: Any, learner: RayLearner) -> None:
        if controller.state.version != 4 or seen:
            return
        replica = controller.state.replicas[1]
        actors = {"learner": learner.ranks[0].actor, "generator": replica.handle.actor}  # type: ignore[attr-defined]
        own = ray.get_runtime_context().get_node_id()
        seen["from"] = (await actors[part].where.remote()).node_id if part in actors else own
        if part == "driver":  # a node without work would go at once
            kept.append(ray.remote(Keeper).options(num_cpus=0, resources={"keeper": 1}).remote())
            await kept[0].there.remote()
        drain(seen["from"], 30.0)
        if part == "generator":
            await until(lambda: not replica.alive or replica.leaving, "notice")
            await until(lambda: replica.takes_work and not replica.leaving, "return of the replica")
            seen["to"] = (await replica.handle.actor.where.remote()).node_id
            seen["restarts"] = replica.restarts
        elif part == "learner":
            await until(lambda: controller._bookkeeping.asked, "wish for a checkpoint")

    done = nodes.run(
        folder, meddle, "cluster=separate", "steps=8", "generator.replicas=2", "max_restarts=0",
        "stall_timeout_seconds=60",
    )  # fmt: skip
    made = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*"))
    told(part, done, **seen, checkpoints=made)


def lost(folder: Path, nodes: Nodes, part: str) -> None:
    """The node of a part is gone at version 7."""
    struck: list[Any] = []

    async def meddle(controller: Any, learner: RayLearner) -> None:
        if controller.state.version == 7 and not struck:
            actor = learner.ranks[0].actor if part == "learner" else controller._runtime.rewards[0].actor  # type: ignore[attr-defined]
            place = await actor.where.remote()
            struck.extend(node for node in nodes.nodes if node.node_id == place.node_id)
            nodes.cluster.remove_node(struck[0], allow_graceful=False)

    done = nodes.run(
        folder, meddle, "cluster=interleave", "steps=14", "batch_size=16", "generator.replicas=2",
        "checkpoint.every=3", "max_restarts=1", "stall_timeout_seconds=100",
    )  # fmt: skip
    told(part, done)


def grown(folder: Path, nodes: Nodes) -> None:
    """A node comes at version 4, and is lost at version 12."""

    async def meddle(controller: Any, learner: RayLearner) -> None:
        state = controller.state
        if state.version == 4:
            assert [r.name for r in state.replicas] == ["generator-0"], "there was room for one"
            nodes.nodes.append(nodes.cluster.add_node(**{**NODE, "num_cpus": 1}))
            await until(lambda: len(state.replicas) == 2 and state.replicas[1].takes_work, "a second replica at work")
        if state.version == 12:
            assert state.replicas[1].restarts == 0
            nodes.cluster.remove_node(nodes.nodes[0])
            await until(lambda: len(state.replicas) == 1, "the end of the replica whose node died")

    done = nodes.run(
        folder, meddle, "steps=24", "generator.max_replicas=2", "max_restarts=1", "logging.progress=plain",
        "stall_timeout_seconds=60",
    )  # fmt: skip
    rows = done.trained
    versions = {name: [int(v) for v in of.consumed_at_version.str[0]] for name, of in rows.groupby("generator_id")}
    told("growth", done, staleness=int(rows.staleness.max()), versions=versions)


def drains_of_three(folder: Path, nodes: Nodes) -> None:
    for part in ("generator", "learner"):
        drained(folder / part, nodes, part)
        nodes.cluster.add_node(**NODE)  # in place of the one that goes
    drained(folder / "driver", nodes, "driver")


SCENES: dict[str, tuple[Callable[[Path, Nodes], None], int, int]] = {  # with the head's CPUs, and nodes beside it
    "drains": (drains_of_three, 0, 3),
    "lost learner": (partial(lost, part="learner"), 0, 3),
    "lost reward": (partial(lost, part="reward"), 0, 3),
    "growth": (grown, 2, 0),
}


def main(folder: Path, scene: str) -> None:
    play, head_cpus, beside = SCENES[scene]
    workers = ForkedWorkers()
    with workers.serving(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drains, "LOOK_SECONDS", 0.2)
        patch.setattr(recovery, "LOOK_SECONDS", 0.3)
        patch.setattr(ray_runtime, "ROOM_SECONDS", 2.0)
        nodes = Nodes(head_cpus, beside)
        try:
            play(folder, nodes)
        finally:
            nodes.cluster.shutdown()
    workers.close()


if __name__ == "__main__":
    with ray_files():
        main(Path(sys.argv[1]), sys.argv[2])
