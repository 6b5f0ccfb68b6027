"""Run by test_lost_node in a process of its own: a cluster that loses, during a run, the node of the part named.

Prints one JSON object: what the run left behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from asyncrlhf.cluster.ray_handles import RayLearner
from tests import loop
from tests.processes import ray_files
from tests.ray_run import before, watch

RUN = (
    "runtime=ray", "cluster=interleave", "steps=14", "batch_size=16", "generator.replicas=2", "checkpoint.every=3",
    "max_restarts=1", "task.heldout_size=2", "stall_timeout_seconds=100",
)  # fmt: skip


def run(folder: Path, part: str, cluster: Cluster, nodes: list[Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    controllers, struck = watch(patch), []

    async def meddle(learner: RayLearner, *_: Any) -> None:
        controller = controllers[0]
        if controller.state.version == 7 and not struck:
            actor = learner.ranks[0].actor if part == "learner" else controller._runtime.rewards[0].actor  # type: ignore[attr-defined]
            place = await actor.where.remote()
            struck.extend(node for node in nodes if node.node_id == place.node_id)
            cluster.remove_node(struck[0], allow_graceful=False)

    before(patch, RayLearner, "train", meddle)
    done = loop.run(folder, *loop.FAKE, *RUN, f"ray.address={cluster.address}")
    done.assert_ledger_whole()
    return {"steps": len(done.metrics), "reason": done.summary["exit_reason"], "ledger": done.summary["ledger"]}


def main(folder: Path, part: str) -> None:
    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(wait=False, **node) for _ in range(3)]
    cluster.wait_for_nodes()
    patch = pytest.MonkeyPatch()
    try:
        print(json.dumps(run(folder / "run", part, cluster, nodes, patch)), flush=True)
    finally:
        patch.undo()
        cluster.shutdown()


if __name__ == "__main__":
    with ray_files():
        main(Path(sys.argv[1]), sys.argv[2])
