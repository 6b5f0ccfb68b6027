"""A process that runs one job of a sweep after the other: it imports only once, and its death ends only one job."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from asyncrlhf.cluster.forked_workers import FIRST, THEN
from asyncrlhf.redaction import redact
from asyncrlhf.sweeps.devices import VISIBLE

LOG_FILE = "output.log"
OF_A_RUN = ("asyncrlhf.orchestrator.run", "asyncrlhf.learner.torch_backend", "asyncrlhf.engines.hf")
END_SECONDS = 90.0  # for a run that was interrupted to write its checkpoint
MOST_TEMPDIR = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # the path of a Unix socket is no longer than 107 bytes


@dataclass(frozen=True)
class Order:
    """One job for a worker. ``ray``: the address of the sweep's Ray, for a job that runs on one. ``threads``: of torch
    in the worker itself, whatever an earlier job used."""

    overrides: tuple[str, ...]
    config_dir: str | None
    log: str
    ray: str
    threads: int


@dataclass(frozen=True)
class Answer:
    """How a job ended: ``state`` is done, failed or interrupted; ``seconds``: its total time."""

    state: str
    seconds: float
    note: str = ""


class Worker:
    """The driver's end. ``busy_with``: the driver's object for the order under way, None for an idle worker.
    ``devices``: the only GPUs that the process sees, by name; all that the driver sees if empty. ``forks``: it is
    forked from a process that has imported what every job needs, so that the workers of a sweep import it once; not
    where the folder for temporary files has too long a path for that process's socket."""

    def __init__(self, devices: tuple[str, ...] = (), forks: bool = False) -> None:
        self.devices = devices
        # Never of this process: the fork of a process with threads may hang.
        forks = forks and len(os.fsencode(tempfile.gettempdir())) <= MOST_TEMPDIR
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload([*FIRST, "ray", *THEN, *OF_A_RUN])
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, list(sys.path), devices), daemon=False)
        self.process.start()
        theirs.close()
        self.busy_with: Any = None
        self._began = 0.0

    @property
    def waits(self) -> list[Any]:
        """The objects to wait for: an answer, or the end of the process."""
        return [self._pipe, self.process.sentinel]

    def give(self, order: Order, busy_with: Any) -> None:
        self.busy_with, self._began = busy_with, time.monotonic()
        with suppress(OSError):  # a worker that died just now is seen by answer()
            self._pipe.send(order)

    def answer(self) -> Answer | None:
        """The end of the job under way, or None while it runs. A dead process means an interrupted job."""
        if self.busy_with is None:
            return None
        with suppress(EOFError, OSError):
            if self._pipe.poll():
                return self._pipe.recv()
        if self.process.is_alive():
            return None
        self.process.join()
        code = self.process.exitcode
        cause = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Answer("interrupted", time.monotonic() - self._began, f"its process ended with {cause}")

    def interrupt(self) -> None:
        """As Ctrl-C: the run ends in order, with a checkpoint if it can write one."""
        self._signal(signal.SIGINT)

    def close(self, seconds: float) -> None:
        """End the process; a run under way has ``seconds`` to end by itself."""
        with suppress(OSError):
            self._pipe.send(None)
        self.process.join(seconds)
        if self.process.is_alive():
            self._signal(signal.SIGKILL)
            self.process.join()
        self._pipe.close()

    def _signal(self, number: int) -> None:
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def _serve(pipe: Connection, path: Sequence[str], devices: Sequence[str]) -> None:
    """The worker process. Only the driver receives Ctrl-C, and passes it on."""
    os.setsid()
    if devices:
        os.environ[VISIBLE] = ",".join(devices)  # read by CUDA at its first use
    sys.path[:] = path
    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between two jobs
    with suppress(EOFError, OSError):  # the driver is gone
        while (order := pipe.recv()) is not None:
            pipe.send(one_job(order))
    _stop_kept_ray()


def one_job(order: Order) -> Answer:
    """Run one job. The Ray of one that did not end well is not kept for the next, for it may be the cause."""
    answer = _run(order)
    if answer.state != "done":
        _stop_kept_ray()
    return answer


def _stop_kept_ray() -> None:
    if "asyncrlhf.cluster.own_ray" in sys.modules:  # else no job has used Ray
        from asyncrlhf.cluster.own_ray import stop_kept

        stop_kept()


def _end_with_the_driver() -> None:
    """End when the driver dies: a new driver would run the same job in the same folder."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def _run(order: Order) -> Answer:
    started = time.monotonic()
    log = Path(order.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        state, note = _train(order)
    except KeyboardInterrupt:
        state, note = "interrupted", "it had not begun to train"
    except Exception as error:  # whatever it is, it is this job's end and no other's
        import traceback

        print(redact(traceback.format_exc()), file=sys.stderr)
        state, note = "failed", redact(" ".join(str(error).split())) or type(error).__name__
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
    return Answer(state, time.monotonic() - started, note)


def _train(order: Order) -> tuple[str, str]:
    import ray
    import torch

    from asyncrlhf.cluster.own_ray import init, is_kept, keep_for_next, shut_down, stop_kept
    from asyncrlhf.config.compose import compose_config
    from asyncrlhf.config.conversion import from_hydra
    from asyncrlhf.orchestrator.run import train
    from asyncrlhf.records.show.summary import plain_words

    torch.set_num_threads(order.threads)
    config = from_hydra(compose_config(order.overrides, Path(order.config_dir) if order.config_dir else None))
    if config.checkpoint.at_end is None:  # a sweep's jobs are compared by their records, and their models fill disks
        config = replace(config, checkpoint=replace(config.checkpoint, at_end=False))
    if order.ray or config.runtime != "ray" or config.ray.cluster:
        stop_kept()
    if order.ray and not ray.is_initialized():
        init(address=order.ray, log_to_driver=False, logging_level=logging.ERROR)
    elif not order.ray:
        if not is_kept():
            shut_down()  # the sweep's, of an earlier job
        keep_for_next()
    summary = train(config)
    print(plain_words(summary))
    reason = str(summary["exit_reason"])
    reached = f"{summary['steps']} of {summary['steps_planned']} steps were done"
    return ("done", "") if reason == "done" else ("interrupted", reached)
