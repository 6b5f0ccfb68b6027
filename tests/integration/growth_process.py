"""Run by test_growth in a process of its own: a cluster that gains a node during a run, and loses it again.

Prints one JSON object: what the run left behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from asyncrlhf.cluster import ray_runtime
from asyncrlhf.cluster.ray_handles import RayLearner
from asyncrlhf.orchestrator.replicas import recovery
from tests import loop
from tests.processes import ray_files
from tests.ray_run import before, until, watch

STORE = 100 * 2**20
RUN = (
    "runtime=ray", "steps=24", "generator.max_replicas=2", "max_restarts=1", "task.heldout_size=2",
    "logging.progress=plain", "stall_timeout_seconds=60",
)  # fmt: skip


def run(folder: Path, cluster: Cluster, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(recovery, "LOOK_SECONDS", 0.3)
    patch.setattr(ray_runtime, "ROOM_SECONDS", 2.0)
    controllers = watch(patch)
    grown: list[Any] = []

    async def meddle(learner: RayLearner, *_: Any) -> None:
        state = controllers[0].state
        if state.version == 4:
            assert [r.name for r in state.replicas] == ["generator-0"], "there was room for one"
            grown.append(cluster.add_node(num_cpus=1, object_store_memory=STORE))
            await until(lambda: len(state.replicas) == 2 and state.replicas[1].takes_work, "a second replica at work")
        if state.version == 12:
            assert state.replicas[1].restarts == 0
            cluster.remove_node(grown[0])
            await until(lambda: len(state.replicas) == 1, "the end of the replica whose node died")

    before(patch, RayLearner, "train", meddle)
    done = loop.run(folder, *loop.FAKE, *RUN, f"ray.address={cluster.address}")
    done.assert_ledger_whole()
    rows = done.trained
    return {
        "steps": len(done.metrics),
        "staleness": int(rows.staleness.max()),
        "versions": {
            name: [int(v) for v in of.consumed_at_version.str[0]] for name, of in rows.groupby("generator_id")
        },
    }


def main(folder: Path) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    )
    patch = pytest.MonkeyPatch()
    try:
        print(json.dumps(run(folder / "run", cluster, patch)), flush=True)
    finally:
        patch.undo()
        cluster.shutdown()


if __name__ == "__main__":
    with ray_files():
        main(Path(sys.argv[1]))
