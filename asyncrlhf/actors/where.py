"""Where an actor runs, and how that machine is reached by others."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

import psutil
import ray


@dataclass(frozen=True)
class Where:
    """``group``: the placement group's id in hex, empty outside of one. ``gpus``: the devices that Ray assigned."""

    node_id: str
    address: str
    group: str
    gpus: tuple[str, ...]


def where() -> Where:
    """Of the actor that calls it."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return Where(
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        context.get_placement_group_id() or "",
        tuple(map(str, gpus)),
    )


def name_interface() -> None:
    """Have gloo use the network card that Ray's address of this machine belongs to. Left alone, gloo takes the address
    of the machine's own name, which many systems define as a loopback (127.0.1.1), and no other machine reaches that.
    """
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
