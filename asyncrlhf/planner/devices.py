"""Devices by name: peaks of catalogues (devices.json), for machines that nobody profiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrlhf.planner.shapes import Cluster, Device, Link

FILE = Path(__file__).with_name("devices.json")
EXPECT = "from a catalogue's peaks, not measured here: expect 30%"


def catalogue() -> list[str]:
    """The names that devices.json has."""
    return list(json.loads(FILE.read_text(encoding="utf-8"))["devices"])


def row_of(name: str) -> dict[str, Any]:
    """What devices.json says of it. Raises ValueError with one sentence for an unknown one."""
    known: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["devices"]
    if name not in known:
        raise ValueError(f"{name} is no device of {FILE.name}; allowed: {', '.join(known)}.")
    return known[name]


def cluster_of(name: str, devices: int) -> Cluster:
    """So many of a named device, in full nodes or in one. Raises ValueError with one sentence for an unknown one."""
    row = row_of(name)
    per_node = min(row["per_node"], devices)
    if devices < 1 or devices % per_node:
        raise ValueError(f"{devices} devices fill no nodes of {per_node}; allowed: fewer than that, or a multiple.")
    return nodes_of(name, devices // per_node, per_node)


def nodes_of(name: str, nodes: int, per_node: int) -> Cluster:
    """So many nodes of a named device. Raises ValueError with one sentence for an unknown one."""
    row = row_of(name)
    device = Device(name, row["flops"], row["bandwidth"], row["memory"], row["source"])
    return Cluster(device, nodes, per_node, Link(*row["intra"]), Link(*row["inter"]))
