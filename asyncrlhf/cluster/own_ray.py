"""A Ray that this process starts on its machine, for one run or for the jobs of a sweep, and stops again.

A process that runs one job after the other calls :func:`keep_for_next`: the Ray of a run that ended then stays for the
next run of the same size, which so saves Ray's start and its workers' imports.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from contextlib import nullcontext, suppress
from typing import Any

import psutil
import ray
from ray._private import utils

from asyncrlhf.cluster.forked_workers import MALLOC, deaf, take
from asyncrlhf.errors import ConfigError
from asyncrlhf.last_words import ENDING, tell
from asyncrlhf.scratch import Scratch

# What an actor starts (an engine's processes) ends with it, however it ends. Read when Ray starts.
END_WITH_ACTORS = ("RAY_process_group_cleanup_enabled", "1")
# Ray's control store would keep an event of each of the last 100,000 calls, for a dashboard that this Ray lacks.
NO_TASK_EVENTS = ("RAY_task_events_report_interval_ms", "0")
# Ray would start workers ahead, and ray.init would wait for them to register: without end if one never does (measured:
# a fork that failed under load). So each actor starts its own, within cluster.start_timeout_seconds.
NO_WORKERS_AHEAD = ("RAY_prestart_worker_first_driver", "0")
# Of the folder of Ray's files, and the longest path above it: Ray's Unix sockets may have paths of 107 characters.
PREFIX, LONGEST = "asyncrlhf-ray-", 20


def init(**options: Any) -> None:
    """``ray.init`` that leaves this process's handlers of signals alone: Ray's own of SIGTERM ends the process without
    a word, and stays in force."""
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        ray.init(**options)
        if (node := ray._private.worker._global_node) is not None:
            tell(ray=node.get_session_dir_path(), process=os.getpid())
    finally:
        utils.set_sigterm_handler = theirs
        renew_handlers()


def shut_down() -> None:
    """``ray.shutdown``, after which signals have the same effect as before: Ray would leave SIGTERM to the system."""
    tell(needs={})
    ray.shutdown()
    renew_handlers()


def renew_handlers() -> None:
    """Install Python's handlers of signals again where a library has replaced what the system calls."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            signal.signal(number, signal.getsignal(number))


class OwnRay:
    """Starts at construction. Its files, logs among them, go at its end, unless RAY_TMPDIR names a place for them.

    ``cpus``: logical CPUs that it offers; ``store``: bytes of its object store; ``options``: others of ``ray.init``.
    Its workers are forked (see :mod:`asyncrlhf.cluster.forked_workers`).
    """

    def __init__(self, cpus: int, store: int, **options: Any) -> None:
        for name, value in (END_WITH_ACTORS, NO_TASK_EVENTS, NO_WORKERS_AHEAD, *MALLOC.items()):
            os.environ.setdefault(name, value)  # inherited by Ray's processes
        self.size = (cpus, store)
        self._workers = take()
        self._scratch = _folder()
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR, **options}
        if self._scratch:
            options["_temp_dir"] = str(self._scratch.path)
        before = set(psutil.Process().children(recursive=True))
        try:
            with (
                deaf(),
                self._workers.serving(),
                self._scratch.of_processes() if self._scratch else nullcontext(),
            ):
                # address: never a cluster that happens to run here
                init(address="local", num_cpus=cpus, object_store_memory=store, **options)
                tell_of_its_processes()
        except BaseException as error:
            begun = set(psutil.Process().children(recursive=True)) - before
            shut_down()
            for process in begun:  # Ray forgets those of a start that did not come to its end
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.stop()
            if isinstance(error, ValueError):  # Ray's answer to a store that leaves its workers no memory
                said = " ".join(str(error).split()).partition(" You can adjust")[0]
                raise ConfigError(
                    f"ray.object_store_mb={store // 2**20} does not fit on this machine: {said}"
                ) from error
            raise

    @property
    def address(self) -> str:
        """HOST:PORT, for ``ray.init`` in other processes."""
        return str(ray.get_runtime_context().gcs_address)

    def stop(self) -> None:
        shut_down()
        self._workers.close()
        if self._scratch:
            self._scratch.close()


def tell_of_its_processes() -> None:
    """Tell the ids of Ray's processes without which a run cannot go on: of a Ray of its own the node process and the
    control store; on a cluster the process of this node, for a control store may come back."""
    node = ray._private.worker._global_node
    if node is None:
        return
    own: dict[str, Any] = node.all_processes
    needs = {name: own[name][0].process.pid for name in ("raylet", "gcs_server") if own.get(name)}
    socket = f"--raylet_socket_name={node.raylet_socket_name}"
    for process in psutil.process_iter() if not own else ():
        with suppress(psutil.Error):
            if process.name() == "raylet" and socket in process.cmdline():
                needs["raylet"] = process.pid
    tell(needs=needs)


def _folder() -> Scratch | None:
    """For Ray's files; None if a variable says where they are to be, and to stay."""
    if os.environ.get("RAY_TMPDIR"):
        return None
    place = tempfile.gettempdir()
    return Scratch(PREFIX, place if len(place) <= LONGEST else "/tmp")


class _Kept:
    """What :func:`keep_for_next` keeps in this process. ``asked``: it was called; ``ray``: no run uses it now."""

    asked = False
    ray: OwnRay | None = None


def keep_for_next() -> None:
    """Keep the Ray of each run that ends from now on, until :func:`stop_kept` or a run of another size."""
    _Kept.asked = True


def is_kept() -> bool:
    """Whether a Ray waits for its next run."""
    return _Kept.ray is not None


def stop_kept() -> None:
    kept, _Kept.ray = _Kept.ray, None
    if kept is not None:
        kept.stop()


def lend(cpus: int, store: int) -> OwnRay:
    """A Ray for one run: the kept one if it has this size, else a new one. It goes back by :func:`give_back`."""
    if _Kept.ray is not None and _Kept.ray.size == (cpus, store):
        kept, _Kept.ray = _Kept.ray, None
        return kept
    stop_kept()
    return OwnRay(cpus, store)


def give_back(own: OwnRay) -> None:
    """The run has ended: keep its Ray, or stop it."""
    if _Kept.asked:
        _Kept.ray = own
    else:
        own.stop()
