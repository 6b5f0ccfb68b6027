"""Cores of this machine that only the learner uses, so that messages and sampling do not push in between its kernels.

The scheduler alone puts controller, Ray's daemons, reward workers and generators on the learner's core for half of
their time: on 2 cores a learner step took 8% longer beside them than with a core of its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class CoreSplit:
    """``ranks``: the cores of each learner rank; ``others``: what is left for all other processes of the run."""

    ranks: tuple[frozenset[int], ...]
    others: frozenset[int]


def split_cores(available: Collection[int], ranks: int, threads: int, other_threads: float) -> CoreSplit | None:
    """A core for each thread of each learner rank, or None where the rest would not hold the ``other_threads``.

    ``threads=0`` leaves the number to Ray, and nothing can be set aside for it.
    """
    cores = sorted(available)
    rest = len(cores) - ranks * threads
    if threads < 1 or rest < max(1.0, other_threads):
        return None
    own = cores[rest:]
    shares = tuple(frozenset(own[i * threads : (i + 1) * threads]) for i in range(ranks))
    return CoreSplit(shares, frozenset(cores[:rest]))


def available_cores() -> frozenset[int]:
    """The cores that this thread may use; empty where the system does not let a process choose (macOS)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cores: Collection[int], *, descendants: bool = False) -> None:
    """Bind every thread of this process, and of all processes below it where asked; whatever they start later inherits
    it. Does nothing without cores."""
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
