"""The machine of an actor, the address at which others reach it, and the cores that the learner has for itself."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from contextlib import suppress
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
    """The place of the actor that calls it."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return Where(
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        context.get_placement_group_id() or "",
        tuple(map(str, gpus)),
    )


def name_interface() -> None:
    """Make gloo use the network card of Ray's address of this machine. By default gloo takes the address of the
    machine's own name, which many systems define as a loopback (127.0.1.1) that no other machine reaches."""
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


@dataclass(frozen=True)
class CoreSplit:
    """``ranks``: the cores of each learner rank; ``others``: the cores of all other processes of the run."""

    ranks: tuple[frozenset[int], ...]
    others: frozenset[int]


def split_cores(available: Collection[int], ranks: int, threads: int, other_threads: float) -> CoreSplit | None:
    """One core for each thread of each learner rank, or None if the rest cannot hold the ``other_threads``.

    ``threads=0`` leaves the number to Ray, so that no cores can be reserved.
    """
    cores = sorted(available)
    rest = len(cores) - ranks * threads
    if threads < 1 or rest < max(1.0, other_threads):
        return None
    own = cores[rest:]
    shares = tuple(frozenset(own[i * threads : (i + 1) * threads]) for i in range(ranks))
    return CoreSplit(shares, frozenset(cores[:rest]))


def available_cores() -> frozenset[int]:
    """The cores that this thread may use; empty if a process cannot choose its cores (macOS)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cores: Collection[int], *, descendants: bool = False) -> None:
    """Bind every thread of this process, and of its descendants if asked, to ``cores``; processes that they start later
    inherit it. Does nothing without cores."""
    if not cores:
        return
    own = psutil.Process()
    for process in [own, *(own.children(recursive=True) if descendants else [])]:
        for thread in _threads(process):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(thread, cores)


def _threads(process: psutil.Process) -> list[int]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return [int(thread.id) for thread in process.threads()]
    return []
