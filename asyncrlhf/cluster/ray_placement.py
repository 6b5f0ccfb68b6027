"""A plan in Ray: reserves its device groups and places each part's actor."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # vLLM uses it too; the public API gives only sums
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrlhf.cluster.nodes import Node, keep_apart, shortage
from asyncrlhf.cluster.placement import DeviceGroup, Part, Plan, add_replica
from asyncrlhf.errors import ConfigError, ReplicaError

LOOK_SECONDS = 0.5  # interval at which a wait for devices can be interrupted
KNOCK_SECONDS = 5.0
LOST_SECONDS = 90.0
NODE_ID = "ray.io/node-id"  # a label that every node has


def knock(address: str) -> None:
    """Raise OSError or ValueError unless a server listens there: Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise ValueError("it names no port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def draining_nodes() -> dict[str, float]:
    """The nodes that Ray drains, where it starts nothing any more, with the seconds until they go; none if Ray does not
    answer."""
    try:
        worker: Any = ray._private.worker.global_worker
        found = worker.gcs_client.get_draining_nodes(timeout=KNOCK_SECONDS)
    except RayError:
        return {}
    return {node: max(0.0, at / 1000 - time.time()) if at else math.inf for node, at in found.items()}


def ray_nodes() -> list[Node]:
    """The living nodes of the Ray that this process is connected to, without those that it drains."""
    free, drained = available_resources_per_node(), draining_nodes()
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in drained]
    return [Node(n["NodeID"], n["Resources"], free.get(n["NodeID"], {}), n.get("Labels") or {}) for n in alive]


def wait_for_true_nodes() -> None:
    """Wait until Ray has noticed the loss of each node that no longer listens, which takes it half a minute; until then
    it would place parts there. Returns after ``LOST_SECONDS`` in any case."""
    deadline = time.monotonic() + LOST_SECONDS
    while any(node["Alive"] and not _listens(node) for node in ray.nodes()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _listens(node: dict[str, Any]) -> bool:
    try:
        knock(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    except OSError:
        return False
    return True


def _free_nodes() -> list[Node]:
    """The living nodes, with their free resources as the total."""
    return [replace(node, total=node.free) for node in ray_nodes()]


def free_in_ray() -> str:
    """Ray's total and free resources, as text for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


class Placer:
    """Holds a run's placement groups from :meth:`reserve` to :meth:`close`.

    ``autoscaling``: nodes are added on request, so that no plan is refused for lack of them.
    """

    def __init__(self, plan: Plan, *, start_seconds: float, autoscaling: bool = False) -> None:
        self.plan = plan
        self._start_seconds = start_seconds
        self._autoscaling = autoscaling
        self._groups: dict[str, PlacementGroup] = {}
        self._apart: dict[str, frozenset[str]] = {}
        self._anywhere: set[str] = set()  # sides that have lost a node chosen for them

    async def reserve(self) -> None:
        """Raises ConfigError for a plan that this Ray can never hold, ReplicaError if it stays occupied too long."""
        nodes = ray_nodes()
        lacking = None if self._autoscaling else shortage(self.plan, nodes)
        if lacking is not None:
            raise ConfigError(lacking)
        self._apart = keep_apart(self.plan, nodes)
        await self._create(self.plan.groups)

    async def add(self, part: Part) -> None:
        """Reserve devices for a replica that was not in the plan."""
        before = len(self.plan.groups)
        self.plan = add_replica(self.plan, part)
        await self._create(self.plan.groups[before:])

    def has_room(self, part: Part) -> bool:
        """Whether a generator that is not in the plan would find free devices now."""
        kept = frozenset().union(*self._apart.values())
        whole = add_replica(self.plan, part)
        loose = {name: seat for name, seat in whole.loose.items() if name == part.name}
        extra = replace(whole, groups=whole.groups[len(self.plan.groups) :], loose=loose)
        return shortage(extra, [node for node in _free_nodes() if node.node_id not in kept]) is None

    def stands(self, part: str) -> bool:
        """Whether the part's devices exist and are free; they are gone if their node died, or is drained."""
        seat = self.plan.seats[part]
        if seat.group:
            table = placement_group_table(self._groups[seat.group])
            return str(table["state"]) == "CREATED" and not self._is_drained(seat.group)
        return shortage(Plan(self.plan.placement, loose={part: seat}), _free_nodes()) is None

    async def renew(self, part: str) -> None:
        """Reserve the part's devices on any node if those chosen for its side are no longer all there. Ray itself moves
        reservations that are bound to no node. Raises ReplicaError if they stay occupied too long."""
        found = [group for group in self.plan.groups if group.name == self.plan.seats[part].group]
        alive = {node.node_id for node in await asyncio.to_thread(ray_nodes)}
        sides = {side for side, nodes in self._apart.items() if not nodes <= alive}
        self._anywhere |= sides
        self._apart = {side: nodes for side, nodes in self._apart.items() if side not in sides}
        bound = bool(found) and (found[0].side in self._anywhere or await asyncio.to_thread(self._may_move, found[0]))
        if bound and not await asyncio.to_thread(self.stands, part):
            remove_placement_group(self._groups[found[0].name])
            await self._create(found)

    def _is_drained(self, group: str) -> bool:
        """Whether one of the group's nodes is drained."""
        return (
            not draining_nodes()
            .keys()
            .isdisjoint(placement_group_table(self._groups[group])["bundles_to_node_id"].values())
        )

    def _may_move(self, group: DeviceGroup) -> bool:
        """Whether Ray drains a node of the group, which leaves it there, and other nodes have room for it now."""
        kept = frozenset().union(*(nodes for side, nodes in self._apart.items() if side != group.side))
        rest = [node for node in _free_nodes() if node.node_id not in kept]
        return self._is_drained(group.name) and shortage(replace(self.plan, groups=(group,), loose={}), rest) is None

    async def _create(self, groups: Iterable[DeviceGroup]) -> None:
        fresh = {group.name: group for group in groups}
        for group in fresh.values():
            selector = {**self._selector(group.side), **group.labels}
            self._groups[group.name] = placement_group(
                [dict(bundle) for bundle in group.bundles],
                strategy=group.strategy,
                bundle_label_selector=[selector] * len(group.bundles) if selector else None,
            )
        await self._wait(list(fresh))

    async def _wait(self, late: list[str]) -> None:
        """Wait until the groups are placed. Not by pg.ready(), which starts a process in each only for this answer."""
        deadline = time.monotonic() + self._start_seconds
        while late:
            if await asyncio.to_thread(self._groups[late[0]].wait, LOOK_SECONDS):
                late.pop(0)
            elif time.monotonic() > deadline:
                raise ReplicaError(
                    f"The devices of {', '.join(late)} were not free within {self._start_seconds:g} s "
                    f"(cluster.start_timeout_seconds); free in Ray: {free_in_ray()}."
                )

    def _selector(self, side: str) -> dict[str, str]:
        """The learner and the reward workers stay on nodes chosen for them; generators use all others, including nodes
        that join later or replace a lost one."""
        if side in self._anywhere:
            return {}
        if side in self._apart:
            return {NODE_ID: f"in({','.join(sorted(self._apart[side]))})"}
        others = sorted(node for nodes in self._apart.values() for node in nodes)
        return {NODE_ID: f"!in({','.join(others)})"} if others else {}

    def options(self, part: str) -> dict[str, Any]:
        """The Ray options of the part's actor."""
        seat = self.plan.seats[part]
        options: dict[str, Any] = {"num_cpus": seat.cpus, "num_gpus": seat.gpus}
        if seat.group:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._groups[seat.group], placement_group_bundle_index=seat.bundles[0]
            )
        elif seat.labels:
            options["label_selector"] = dict(seat.labels)
        if len(seat.bundles) > 1:
            options["runtime_env"] = {"env_vars": self._worker_environment(part)}
        return options

    def _worker_environment(self, part: str) -> dict[str, str]:
        """vLLM's Ray executor reads its workers' bundles from these two variables. Workers of one node are listed side
        by side, so that tensor-parallel ones are neighbours."""
        seat = self.plan.seats[part]
        nodes = placement_group_table(self._groups[seat.group])["bundles_to_node_id"]
        first = nodes[seat.bundles[0]]
        order = sorted(seat.bundles, key=lambda place: (nodes[place] != first, nodes[place], place))
        return {
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, order)),
            "VLLM_RAY_PER_WORKER_GPUS": f"{seat.worker_gpus:g}",
        }

    def close(self) -> None:
        """Release the devices; the actors on them must have ended."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
