"""Runs the jobs of a sweep: in parallel as far as the machine allows, alone if their time is measured."""

from __future__ import annotations

import math
import os
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from asyncrlhf.config.compose import quoted
from asyncrlhf.config.environment_config import MAX_TAG
from asyncrlhf.sweeps.devices import Devices, needs
from asyncrlhf.sweeps.job import Job
from asyncrlhf.sweeps.plan import SweepPlan
from asyncrlhf.sweeps.record import SweepRecord
from asyncrlhf.sweeps.table import SweepTable
from asyncrlhf.sweeps.worker import END_SECONDS, LOG_FILE, Answer, Order, Worker
from asyncrlhf.validation import check_package

CLOSE_SECONDS = 5.0  # for an idle worker to end
LOOK_SECONDS = 1.0  # between two readings of the jobs' metrics, for the table
QUIET = ("logging.progress=plain", "logging.report=false")


class Sweeper:
    """Gives jobs to workers until none is left. Ctrl-C may interrupt ``run``; the record is then complete."""

    def __init__(self, plan: SweepPlan, record: SweepRecord, table: SweepTable) -> None:
        self._plan, self._record, self._table = plan, record, table
        jobs = plan.jobs if plan.search is None else plan.search.jobs
        self._left = deque(job for job in jobs if record.jobs[job.hash].state != "done")
        self._cores = float(len(os.sched_getaffinity(0)))
        self._devices = Devices.of(plan.configs)
        # A library that touches CUDA while it is imported makes it unusable in forks.
        self._forks = not self._devices.count
        self._workers: list[Worker] = []
        self._ray: Any = None
        self._config_dir = str(plan.config_dir) if plan.config_dir else None

    def run(self) -> None:
        """Raises KeyboardInterrupt after Ctrl-C, when every running job has ended and is recorded."""
        try:
            while self._left or self._running() or self._searched():
                self._start_what_fits()
                wait([source for worker in self._running() for source in worker.waits], timeout=LOOK_SECONDS)
                self._collect()
                self._table.show(self._record)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            for worker in self._workers:
                worker.close(CLOSE_SECONDS)
            self._stop_ray()
            self._table.show(self._record)

    def _searched(self) -> bool:
        """Add a search's next jobs, as many trials at once as run in parallel; returns False when it has no more."""
        search = self._plan.search
        if search is None:
            return False
        cores, gpus = needs(self._plan.configs[0])
        fitting = min(self._cores / cores, self._devices.count / gpus if gpus else math.inf)
        fitting = 1 if self._plan.settings.timing == "exclusive" else self._plan.settings.jobs or int(fitting)
        jobs = search.more(self._record.jobs, self._record.folder, max(1, fitting // self._plan.settings.seeds))
        self._record.add(jobs)
        self._record.save()
        self._left.extend(jobs)
        return bool(jobs)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.busy_with is not None]

    def _start_what_fits(self) -> None:
        while self._left and self._fits(self._left[0]):
            job = self._left.popleft()
            if job.exclusive:
                self._stop_ray()
            record = self._record.jobs[job.hash]
            extra = [*self._record.begin(record), *self._grouped(job)]
            log = self._record.folder / record.folder / LOG_FILE
            shared = job.config.runtime == "ray" and not (job.exclusive or job.config.ray.cluster)
            address = self._ray_address() if shared else ""
            threads = int(self._cores) if job.exclusive else 1
            order = Order((*job.overrides, *QUIET, *extra), self._config_dir, str(log), address, threads)
            devices = self._devices.take(needs(job.config)[1]) if job.config.runtime == "local" else ()
            self._worker_for(job, devices).give(order, job)

    def _grouped(self, job: Job) -> list[str]:
        """Let W&B show the jobs of a sweep as one group, each named by its choices, unless the user set other names."""
        logging = job.config.logging
        tags = [f"{key}={value}"[:MAX_TAG] for key, value in job.choices.items()] + [f"seed={job.seed}"]
        own = {"group": self._plan.folder_name, "name": job.name, "job_type": job.part or "job", "tags": tags}
        named = {name: value for name, value in (own | logging.wandb_keywords).items() if value}
        written = (
            f"{name}:[{','.join(quoted(str(v)) for v in value)}]" if name == "tags" else f"{name}:{quoted(str(value))}"
            for name, value in named.items()
        )
        added = "++" if logging.wandb_keywords else ""  # to those of the user
        return [f"{added}logging.wandb_kwargs={{{','.join(written)}}}"]

    def _fits(self, job: Job) -> bool:
        """Whether the job may start now. An exclusive job waits for all others to end, and all others wait for it. Ray
        chooses GPUs without regard to the local jobs', so jobs of the two kinds do not use GPUs at the same time."""
        under_way: list[Job] = [worker.busy_with for worker in self._running()]
        if not under_way:
            return True
        if job.exclusive or any(other.exclusive for other in under_way):
            return False
        most = self._plan.settings.jobs or len(under_way) + 1
        cores, gpus = (sum(column) for column in zip(*(needs(j.config) for j in [*under_way, job]), strict=True))
        own = needs(job.config)[1]
        kinds = {other.config.runtime for other in [*under_way, job] if needs(other.config)[1]}
        there = self._devices.fit(own) if kinds == {"local"} else len(kinds) < 2 and gpus <= self._devices.count
        return len(under_way) < most and cores <= self._cores and (there or not own)

    def _worker_for(self, job: Job, devices: tuple[str, ...]) -> Worker:
        """A worker for this job: a new one where the job itself runs in it, an idle one where the parts are on Ray."""
        for worker in self._workers:
            if not self._ends_with(job, devices) and worker.busy_with is None and worker.process.is_alive():
                return worker
        self._workers.append(Worker(devices, forks=self._forks))
        return self._workers[-1]

    def _ends_with(self, job: Job, devices: tuple[str, ...]) -> bool:
        """Whether a worker serves this job alone. Losses, rewards and sinks of the user would find what they left in
        their modules in the job before; a new process costs seconds where it must import, and little as a fork."""
        return bool(devices) or (self._forks and job.config.runtime == "local")

    def _collect(self) -> None:
        for worker in self._running():
            answer = worker.answer()
            if answer is not None:
                self._file(worker, answer)

    def _file(self, worker: Worker, answer: Answer) -> None:
        job: Job = worker.busy_with
        record, worker.busy_with = self._record.jobs[job.hash], None
        if self._ends_with(job, worker.devices):
            worker.close(CLOSE_SECONDS)
            self._workers.remove(worker)
        if worker.devices:  # they are free when the process that holds their memory has ended
            self._devices.free(worker.devices, needs(job.config)[1])
        self._record.end(record, answer.state, answer.seconds, answer.note)
        self._table.ended(record)

    def _interrupt(self) -> None:
        """End each running job in order; a second Ctrl-C, or too long a wait, ends them at once."""
        self._table.message("Interrupted: the jobs under way are ending; the same command continues the sweep.")
        for worker in self._running():
            worker.interrupt()
        for worker in self._running():
            with suppress(KeyboardInterrupt):
                wait(worker.waits, timeout=END_SECONDS)
            answer = worker.answer() or Answer("interrupted", 0.0, "it was stopped before it finished")
            worker.close(0.0)
            self._file(worker, answer)

    def _ray_address(self) -> str:
        """The address of one Ray for all jobs that run in parallel, started with the first of them. An exclusive job
        has its worker's, pinned to cores as that of ``train``, so that its measured time is that of ``train``."""
        if self._ray is None:
            from asyncrlhf.cluster.own_ray import OwnRay

            store = max(config.ray.object_store_mb for config in self._plan.configs) * 2**20
            self._ray = OwnRay(math.ceil(self._cores), store)
        return self._ray.address

    def _stop_ray(self) -> None:
        if self._ray is not None:
            self._ray.stop()
            self._ray = None


def open_sweep(plan: SweepPlan, runs: Path, accept_changed: bool) -> SweepRecord:
    """The record of the sweep's folder, with the results of earlier commands."""
    if plan.search is not None:
        check_package("sweep.search=optuna", "optuna", "optuna")
    record = SweepRecord(runs / "sweeps" / plan.folder_name, plan)
    record.folder.mkdir(parents=True, exist_ok=True)
    record.join(accept_changed)
    return record
