"""Run by test_drain in a process of its own: a cluster that drains, during a run, the node of the part named.

Prints one JSON object: what the run left behind.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from asyncrlhf.cluster.ray_handles import RayLearner
from asyncrlhf.orchestrator import drains
from tests import loop
from tests.processes import ray_files
from tests.ray_run import before, until, watch

PREEMPTION = 2  # Ray's reason of a drain
RUN = (
    "runtime=ray", "cluster=separate", "steps=16", "generator.replicas=2", "max_restarts=0", "task.heldout_size=2",
    "stall_timeout_seconds=60",
)  # fmt: skip


class Keeper:
    def there(self) -> bool:
        return True


def drain(node: str, seconds: float) -> None:
    worker: Any = ray._private.worker.global_worker
    worker.gcs_client.drain_node(node, PREEMPTION, "the machine goes", int((time.time() + seconds) * 1000))


def run(folder: Path, part: str, cluster: Cluster, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(drains, "LOOK_SECONDS", 0.2)
    controllers, seen, kept = watch(patch), dict[str, Any](), list[Any]()

    async def meddle(learner: RayLearner, *_: Any) -> None:
        controller = controllers[0]
        state = controller.state
        if state.version != 4 or seen:
            return
        replica = state.replicas[1]
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
            seen["to"] = (await replica.handle.actor.where.remote()).node_id  # type: ignore[attr-defined]
            seen["restarts"] = replica.restarts
        elif part == "learner":
            await until(lambda: controller._bookkeeping.asked, "wish for a checkpoint")

    before(patch, RayLearner, "train", meddle)
    done = loop.run(folder, *loop.FAKE, *RUN, f"ray.address={cluster.address}")
    done.assert_ledger_whole()
    made = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*"))
    return seen | {"reason": done.summary["exit_reason"], "steps": len(done.metrics), "checkpoints": made}


def main(folder: Path, part: str) -> None:
    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "num_cpus": 0, "resources": {"keeper": 1}, "include_dashboard": False},
    )
    for _ in range(3):
        cluster.add_node(wait=False, **node)
    cluster.wait_for_nodes()
    patch = pytest.MonkeyPatch()
    try:
        print(json.dumps(run(folder / "run", part, cluster, patch)), flush=True)
    finally:
        patch.undo()
        cluster.shutdown()


if __name__ == "__main__":
    with ray_files():
        main(Path(sys.argv[1]), sys.argv[2])
