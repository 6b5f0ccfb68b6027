"""Devices by name: data-sheet peaks (devices.json), for machines without a profile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from asyncrlhf.planner.shapes import Cluster, Device, Link

FILE = Path(__file__).with_name("devices.json")
LATENCY, FAR_LATENCY = 5e-6, 1e-5  # seconds per message inside a node and between nodes
EXPECT = "from data-sheet peaks, not measured here: expect errors of 30%"


def catalogue() -> dict[str, dict[str, Any]]:
    """The rows of devices.json by name."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: row for name, row in rows.items() if name != "note"}


def cluster_of(name: str, devices: int) -> Cluster:
    """A cluster of ``devices`` of a named device: one node or several full ones. Raises ValueError (one sentence)."""
    per_node = min(_row(name)["per_node"], devices)
    if devices < 1 or devices % per_node:
        raise ValueError(f"{devices} devices do not fill nodes of {per_node}; allowed: fewer, or a multiple.")
    return nodes_for(name, devices, per_node)


def nodes_for(name: str, devices: int, per_node: int = 0) -> Cluster:
    """The full nodes that ``devices`` need, with ``per_node`` devices each (0: the catalogue's number)."""
    row = _row(name)
    each = min(devices, per_node or row["per_node"])
    device = Device(name, row["flops"], row["bandwidth"], row["memory"], row["source"])
    links = Link(LATENCY, row["intra"]), Link(FAR_LATENCY, row["inter"])
    return Cluster(device, math.ceil(devices / each), each, *links)


def _row(name: str) -> dict[str, Any]:
    known = catalogue()
    if name not in known:
        raise ValueError(f"{name} is not a device of {FILE.name}; allowed: {', '.join(known)}.")
    return known[name]
