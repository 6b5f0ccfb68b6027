"""A Ray that this process starts on its machine, for one run or for the jobs of a sweep, and stops again."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any

import ray

from asyncrlhf.cluster.forked_workers import ForkedWorkers

# glibc gives freed memory back to the system after every step and takes it again page by page at the next; with these
# the actors of a local run keep it (measured: a fifth more samples/s on the tiny model). Read when a process starts.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(10**9),
    "MALLOC_TRIM_THRESHOLD_": str(2 * 10**9),
    "MALLOC_TOP_PAD_": str(10**8),
}
# What an actor starts (an engine's processes) ends with it, however it ends. Read when Ray starts.
END_WITH_ACTORS = ("RAY_process_group_cleanup_enabled", "1")
# Ray's control store would keep an event of each of the last 100,000 calls, for a dashboard that this Ray lacks.
NO_TASK_EVENTS = ("RAY_task_events_report_interval_ms", "0")


class OwnRay:
    """Starts at construction. ``cpus``: logical CPUs that it offers; ``store``: bytes of its object store; ``forks``:
    workers are forked (see :mod:`asyncrlhf.cluster.forked_workers`), False if any will use a GPU; ``options``:
    others of ``ray.init``."""

    def __init__(self, cpus: int, store: int, forks: bool = True, **options: Any) -> None:
        for name, value in (END_WITH_ACTORS, NO_TASK_EVENTS, *MALLOC.items()):
            os.environ.setdefault(name, value)  # inherited by Ray's processes
        self._workers = ForkedWorkers() if forks else None
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR, **options}
        try:
            with self._workers.serving() if self._workers else nullcontext():
                # address: never a cluster that happens to run here
                ray.init(address="local", num_cpus=cpus, object_store_memory=store, **options)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT, for ``ray.init`` in other processes."""
        return str(ray.get_runtime_context().gcs_address)

    def stop(self) -> None:
        ray.shutdown()
        if self._workers:
            self._workers.close()
