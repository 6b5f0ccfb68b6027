"""Run by test_cluster in a process of its own: a Ray of three nodes on this machine, and runs that join it.

Prints one JSON object a run: who sat where, what the run left behind, or the sentence it was refused with.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from asyncrlhf.cluster.forked_workers import ForkedWorkers
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.errors import AsyncRLHFError
from tests import loop
from tests.processes import ray_files

KINDS = ("quick", "slow")  # of the nodes beside the head
NODES, CPUS = 1 + len(KINDS), 2
LABELS = "cluster.node_labels={learner:{kind:%s},generator:{kind:%s}}"
STORE = 100 * 2**20
RUN = ("runtime=ray", "steps=3", "batch_size=16", "num_generations=4", "generator.slots=16", "task.heldout_size=2")
MALLOC = "MALLOC_TRIM_THRESHOLD_"


async def look(runtime: RayRuntime) -> dict[str, Any]:
    """Where Ray itself says that each actor is, and which nodes hold the group that its seat names."""
    actors = {rank.name: rank.actor for rank in runtime.learner.ranks}
    for part in [*runtime.generators, *runtime.rewards]:
        actors[part.name] = part.actor  # type: ignore[attr-defined,union-attr]
    found, labels = {}, {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    for name, actor in actors.items():
        place = asdict(await actor.where.remote())
        seat = runtime.plan.seats[name]
        if seat.group:
            table = placement_group_table(runtime._placer._groups[seat.group])
            place["bundle_node"] = table["bundles_to_node_id"][seat.bundles[0]]
            place["bundle_group"] = table["placement_group_id"]
        place["malloc"] = await actor.__ray_call__.remote(lambda self: os.environ.get(MALLOC))
        found[name] = place | {"labels": labels[place["node_id"]]}
    return found


def run(folder: Path, address: str, *overrides: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    start = RayRuntime.start

    async def noted(runtime: RayRuntime) -> None:
        await start(runtime)
        seen.update(await look(runtime))

    RayRuntime.start = noted  # type: ignore[method-assign]
    try:
        done = loop.run(folder, *RUN, f"ray.address={address}", *overrides)
    except AsyncRLHFError as error:
        return {"error": str(error), "exit_code": error.exit_code, "where": seen}
    finally:
        RayRuntime.start = start  # type: ignore[method-assign]
    done.assert_ledger_whole()
    return {"where": seen, "steps": len(done.metrics), "staleness": int(done.trained.staleness.max())}


def run_beside_others(folder: Path, address: str) -> dict[str, Any]:
    """Someone else holds two of the three nodes for as long as the run waits."""
    ray.init(address=address, log_to_driver=False, logging_level="error")
    group = placement_group([{"CPU": CPUS}] * (NODES - 1), strategy="STRICT_SPREAD")
    assert group.wait(30)
    try:
        return run(folder, address, "cluster=separate", "generator.replicas=2", "cluster.start_timeout_seconds=2")
    finally:
        remove_placement_group(group)
        ray.shutdown()


def main(folder: Path) -> None:
    node = {"num_cpus": CPUS, "object_store_memory": STORE}
    workers = ForkedWorkers()
    with workers.serving():
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        for kind in KINDS:
            cluster.add_node(wait=False, labels={"kind": kind}, **node)
    cluster.wait_for_nodes()
    try:
        jobs = {
            "separate": lambda out: run(out, cluster.address, "cluster=separate", "generator.replicas=2"),
            "interleave": lambda out: run(out, cluster.address, "cluster=interleave", "async.mode=fixed_lag"),
            "flatten": lambda out: run(out, cluster.address, "cluster=flatten", "generator.replicas=2"),
            "labelled": lambda out: run(out, cluster.address, "generator.replicas=2", LABELS % ("slow", "quick")),
            "no_such": lambda out: run(out, cluster.address, LABELS % ("quick", "best")),
            "too_wide": lambda out: run(out, cluster.address, "cluster=flatten", "learner.threads=4"),
            "busy": lambda out: run_beside_others(out, cluster.address),
            "nowhere": lambda out: run(out, "127.0.0.1:1"),
            "client": lambda out: run(out, "ray://head"),
        }
        for name, job in jobs.items():
            print(json.dumps({"name": name, **job(folder / name)}), flush=True)
    finally:
        cluster.shutdown()
        workers.close()


if __name__ == "__main__":
    with ray_files():
        main(Path(sys.argv[1]))
