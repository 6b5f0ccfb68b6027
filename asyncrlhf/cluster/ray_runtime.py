"""The Ray runtime: every part is an actor; token arrays go from actor to actor through the object store."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from asyncrlhf.actors.annotator import AnnotatorSpec
from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import RolloutBundle, resolved
from asyncrlhf.actors.where import available_cores, keep_to, split_cores
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.cluster.forked_workers import MALLOC
from asyncrlhf.cluster.handles import DRIVER, LONG_SECONDS, AnnotatorHandle, EpisodesHandle, GeneratorHandle, Runtime
from asyncrlhf.cluster.nodes import this_machine
from asyncrlhf.cluster.own_ray import OwnRay, give_back, init, is_kept, lend, shut_down, tell_of_its_processes
from asyncrlhf.cluster.placement import Plan, Specs, first_turn, generator_part, make_plan, parts_of
from asyncrlhf.cluster.ray_calls import ask
from asyncrlhf.cluster.ray_episodes import RayEpisodes
from asyncrlhf.cluster.ray_handles import RayAnnotator, RayGenerator, RayLearner, addressed
from asyncrlhf.cluster.ray_placement import (
    Placer,
    draining_nodes,
    free_in_ray,
    knock,
    ray_nodes,
    wait_for_true_nodes,
)
from asyncrlhf.cluster.ray_records import RayRecords
from asyncrlhf.config.environment_config import ClusterConfig, RayConfig
from asyncrlhf.errors import ConfigError, ReplicaError
from asyncrlhf.last_words import tell
from asyncrlhf.records.write.rollout_rows import RolloutRow
from asyncrlhf.transport.build_transport import mapped_transport
from asyncrlhf.transport.protocol import LostReceiversError, replica_name, worker_name
from asyncrlhf.types import Payload, Rollout

# libgomp's threads spin for their next kernel, which stops all threads on a shared core: two threads beside
# one busy process made a third of their tokens. With this they spin as briefly as if libgomp knew of the other process.
BRIEF_SPINS = ("GOMP_SPINCOUNT", "1000")
ROOM_SECONDS = 20.0  # for the devices of a dead replica to be free, or to be there at all, before it is started again


class RayRuntime(Runtime):
    """Starts Ray for the run, unless it runs already or ``ray.address`` names a cluster; stops only what it started."""

    def __init__(
        self, cluster: ClusterConfig, config: RayConfig, specs: Specs, stall_seconds: float, run_dir: Path | None = None
    ) -> None:
        """``run_dir``: where the learner will save, which its machine must see; None if it will not save."""
        self._cluster = cluster
        self._config = config
        self._specs = specs
        self._run_dir = run_dir
        self._parts = parts_of(specs, cluster)
        self._placer: Placer
        self._own_ray: OwnRay | None = None
        self._joined = False
        self._cores_before: frozenset[int] = frozenset()
        self._rank_cores: Sequence[Collection[int]] = ()  # where the ranks have cores of their own
        self.records = RayRecords(stall_seconds / 3, cluster.start_timeout_seconds)
        self._endpoint = ""
        self._epoch = 0
        self.sharing = frozenset()
        self.tell = lambda text: None
        self.generators, self.rewards, self.references, self.critics, self.episodes = [], [], [], [], []
        self.learner: RayLearner

    @property
    def plan(self) -> Plan:
        return self._placer.plan

    def _init_ray(self) -> None:
        if ray.is_initialized() and not is_kept():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = self._config.cluster
        if address:
            # Ray's processes of other nodes inherit nothing from this one.
            inherited = {"env_vars": {name: os.environ.get(name, value) for name, value in MALLOC.items()}}
            try:
                knock(address)
                init(address=address, runtime_env=inherited, log_to_driver=False, logging_level=logging.ERROR)
                tell_of_its_processes()
                tell(cluster=ray.get_runtime_context().gcs_address)
            except (OSError, ValueError, RuntimeError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                # Ray shows a token only to a cluster that it finds itself (auto), or if it is told to.
                token = "" if "RAY_AUTH_MODE" in os.environ else ", with RAY_AUTH_MODE=token if it asks for one"
                raise ConfigError(
                    f"ray.address={address} reaches no cluster: {reason}; "
                    f"allowed: auto, or HOST:PORT of its head{token}."
                ) from error
        else:
            plan = make_plan(self._cluster.placement, self._parts, nodes=1)
            if sum(part.cpus for part in self._parts) > (os.cpu_count() or 1):
                os.environ.setdefault(*BRIEF_SPINS)
            cpus, store = int(this_machine(plan, gpus=0).total["CPU"]), self._config.object_store_mb * 2**20
            self._own_ray = lend(cpus, store)
        self._joined = True

    async def _set_cores_aside(self) -> None:
        """After start-up, pin this process and all others that Ray started off the learner's cores. Not on a Ray that
        others started, not if GPUs do the work, and not for parts that take turns with the learner. Not beside workers
        of episodes either, which no CPUs are reserved for: with all but the learner on one of two cores, one-turn
        episodes made two thirds of the steps."""
        learner = self._specs.learner.learner
        if not self._own_ray or self.plan.sharing or self.plan.total("GPU") or self.episodes:
            return
        others = sum(part.cpus for part in self._parts if part.kind != "learner")
        before = available_cores()
        split = split_cores(before, learner.ranks, learner.threads, others)
        if split is not None:
            self._cores_before = before
            keep_to(split.others, descendants=True)
            self._rank_cores = split.ranks
            await self.learner.keep_to(split.ranks)

    async def start(self) -> None:
        """Raises ConfigError, before any actor starts, for a plan that this Ray can never hold."""
        self.tell(f"Joining Ray at {self._config.cluster}" if self._config.cluster else "Starting Ray")
        self._init_ray()
        await asyncio.sleep(0)  # a signal that came meanwhile ends the start here
        seconds = self._cluster.start_timeout_seconds
        nodes = len(ray_nodes())
        plan = make_plan(self._cluster.placement, self._parts, nodes)
        self._placer = Placer(plan, start_seconds=seconds, autoscaling=self._cluster.autoscaling)
        await self._placer.reserve()
        self.sharing = plan.sharing
        self._choose_transport()
        self.learner = self._learner()
        asked = (self._specs.reward, self._specs.reference, self._specs.critic)
        self.rewards, self.references, self.critics = map(self._annotators, asked)
        self.episodes = self._episodes(self._specs.episodes)
        first: list[Any] = [self.learner]
        if plan.sharing and self._specs.learner.offloads:
            await self._until_ready(first)
            self._specs, first = await first_turn(self.learner, self._specs, plan.sharing, plan.crowd), []
        parts = [*first, *self.rewards, *self.references, *self.critics, *self.episodes]
        if plan.placement == "one_gpu":
            await self._start_in_line(parts)
        else:
            self.generators = [self._generator(spec) for spec in self._specs.generators]
            await self._until_ready([*parts, *self.generators])
        if nodes > 1:
            await self._check_run_dir()
        if self._config.cluster:
            self.records.begin()
        await self._set_cores_aside()
        self._endpoint = await self.learner.listen()

    async def _start_in_line(self, first: Sequence[Any]) -> None:
        """On one GPU that all use at once: each engine measures the free memory when it starts, and must not take what
        another part allocates meanwhile for its own."""
        await self._until_ready(first)
        for spec in self._specs.generators:
            self.generators.append(self._generator(spec))
            await self._until_ready(self.generators[-1:])

    def _choose_transport(self) -> None:
        """Memory of the learner that replicas map, where ``weights.transport`` allows it: on a Ray that other machines
        may join, or with GPUs, only if it asks for it, or if ``cluster.placement`` puts all of them on one GPU."""
        learner = self._specs.learner
        alone = self._own_ray is not None and not self.plan.total("GPU")
        kind = mapped_transport(
            learner.weights,
            sharded=learner.learner.sharded,
            adapter=learner.model.lora.r > 0,
            on_cpus=alone,
            on_card=self.plan.placement == "one_gpu",
        )
        if not kind:
            return
        self.maps, weights = True, replace(learner.weights, transport=kind)
        generators = [replace(spec, weights=weights) for spec in self._specs.generators]
        self._specs = replace(self._specs, generators=generators, learner=replace(learner, weights=weights))

    async def _until_ready(self, parts: Sequence[Any]) -> None:
        """Wait for the parts and report each actor that has loaded its model, or only some if there are many."""
        self.tell(f"Loading the model in {len(parts)} actors")
        counted, every = itertools.count(1), max(1, len(parts) // 8)

        async def ready(part: Any) -> None:
            await part.ready()
            if (number := next(counted)) % every == 0:
                self.tell(f"Actors: {number} of {len(parts)} ready")

        await asyncio.gather(*(ready(part) for part in parts))

    def _learner(self) -> RayLearner:
        ranks = [self._placer.options(f"learner-{i}") for i in range(self._specs.learner.learner.ranks)]
        fresh = RayLearner(self._specs.learner, ranks, self._cluster.start_timeout_seconds)
        for rank in fresh.ranks:
            rank.told = self.told
        return fresh

    async def restart_learner(self) -> None:
        """On the same devices, or on others if the placement finds some."""
        for rank in self.learner.ranks:
            ray.kill(rank.actor)
        for rank in self.learner.ranks:
            await self._wait_for_room(rank.name, self._cluster.start_timeout_seconds)
        self.learner = self._learner()
        await self.learner.ready()
        if self._rank_cores:
            await self.learner.keep_to(self._rank_cores)
        self._endpoint = await self.learner.listen()

    def _annotators(self, spec: AnnotatorSpec | None) -> list[AnnotatorHandle]:
        if spec is None:
            return []
        options, seconds = self._placer.options, self._cluster.start_timeout_seconds
        numbers = range(spec.settings.workers)
        workers: list[AnnotatorHandle] = []
        for worker in (RayAnnotator(spec, i, options(f"{spec.kind}-{i}"), seconds) for i in numbers):
            worker.told, worker.renew, worker.survived = self.told, self._renewed, self.survived
            workers.append(worker)
        return workers

    def _episodes(self, spec: EpisodeSpec | None) -> list[EpisodesHandle]:
        if spec is None:
            return []
        names = [f"{spec.kind}-{i}" for i in range(spec.settings.workers)]
        seconds = self._cluster.start_timeout_seconds
        workers = [RayEpisodes(spec, i, self._placer.options(name), seconds) for i, name in enumerate(names)]
        for worker in workers:
            worker.told, worker.renew = self.told, self._renewed
        return [*workers]

    def _generator(self, spec: GeneratorSpec) -> RayGenerator:
        fresh = RayGenerator(spec, self._placer.options(spec.name), self._cluster.start_timeout_seconds)
        fresh.told = self.told
        return fresh

    async def _check_run_dir(self) -> None:
        """The learner's ranks write checkpoints themselves: find a missing folder now, not at the first one."""
        blind = await self.learner.blind(self._run_dir) if self._run_dir is not None else []
        if blind:
            raise ConfigError(
                f"run_dir={self._run_dir} does not exist on the learner's machine {', '.join(blind)}, which writes the "
                "checkpoints; give a run_dir on a file system that all nodes share."
            )

    def parts(self) -> Sequence[Any]:
        return [*self.generators, *self.rewards, *self.references, *self.critics, *self.episodes, *self.learner.ranks]

    async def connect(self, receivers: Sequence[GeneratorHandle], workers: int = 0) -> int:
        """Raises LostReceiversError naming those that died or hung: it waits for all others, but not for them."""
        self._epoch += 1
        epoch, names = self._epoch, [r.name for r in receivers]
        members = [worker_name(name, i) for name in names for i in range(workers)] if workers else names
        joins = [
            asyncio.create_task(
                r.call(LONG_SECONDS, GeneratorWorker.connect, self._endpoint, rank, len(members) + 1, epoch)
            )
            for rank, r in zip(range(1, len(members) + 1, workers or 1), receivers, strict=True)
        ]
        lost: dict[str, str] = {}
        try:
            await self.learner.call(LONG_SECONDS, LearnerWorker.connect, self._endpoint, members, epoch)
        except LostReceiversError as error:
            lost.update({replica_name(member): reason for member, reason in error.receivers.items()})
        except BaseException:
            for join in joins:
                join.cancel()
            raise
        for name, join in zip(names, joins, strict=True):
            if name in lost:
                join.cancel()
        for name, outcome in zip(names, await asyncio.gather(*joins, return_exceptions=True), strict=True):
            if isinstance(outcome, ReplicaError):
                lost.setdefault(name, "died")
            elif isinstance(outcome, Exception) and not lost:
                raise outcome
        if lost:
            raise LostReceiversError(f"The weight group of epoch {epoch} could not form", lost)
        return epoch

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        assert isinstance(dead, RayGenerator)
        ray.kill(dead.actor)
        await self._wait_for_room(dead.name)
        fresh = self._generator(dead.spec)
        try:
            await fresh.ready()
        except BaseException:  # also where the run ends meanwhile: a traceback may hold the handle, and it the process
            ray.kill(fresh.actor)
            raise
        self.generators[:] = [fresh if g is dead else g for g in self.generators]
        return fresh

    async def _renewed(self, name: str) -> dict[str, Any]:
        await self._wait_for_room(name)
        return self._placer.options(name)

    async def _wait_for_room(self, name: str, seconds: float = ROOM_SECONDS) -> None:
        """Wait for devices, which a dead process frees in a moment, and which are reserved on another node if theirs
        was lost; raises ReplicaError after ``seconds``."""
        await asyncio.to_thread(wait_for_true_nodes)
        await self._placer.renew(name)
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(self._placer.stands, name):
            if time.monotonic() > deadline:
                seat = self.plan.seats[name]
                raise ReplicaError(
                    f"{name} cannot be restarted anywhere: it needs {seat.cpus:g} CPUs and {seat.gpus:g} GPUs; free "
                    f"in Ray: {free_in_ray()}"
                )
            await asyncio.sleep(ROOM_SECONDS / 40)

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """A lost replica's name is used again. Asks Ray whether there is room now."""
        wanted = self._lacking(present)
        spec = await asyncio.to_thread(lambda: next((s for s in wanted if self._has_room(s)), None))
        if spec is None:
            return None
        if spec.name not in self.plan.seats:
            await self._placer.add(generator_part(spec, self._cluster))
        fresh = self._generator(spec)
        await fresh.ready()
        self.generators[:] = [*(g for g in self.generators if g.name != fresh.name), fresh]
        return fresh

    def _lacking(self, present: Collection[str]) -> list[GeneratorSpec]:
        """For each kind the first replica that ``max_replicas`` allows and the run lacks."""
        found: dict[str, GeneratorSpec] = {}
        for spec in self._specs.generators:
            prefix = spec.name.rpartition("-")[0]
            names = (f"{prefix}-{number}" for number in range(spec.generator.max_replicas))
            free = next((name for name in names if name not in present), None)
            if free is not None:
                found.setdefault(prefix, replace(spec, name=free))
        return list(found.values())

    def _has_room(self, spec: GeneratorSpec) -> bool:
        if spec.name in self.plan.seats:
            return self._placer.stands(spec.name)
        return self._placer.has_room(generator_part(spec, self._cluster))

    async def leaving(self) -> dict[str, tuple[str, float]]:
        """The parts on nodes of the cluster that Ray drains, each with its node and the seconds until that goes; the
        driver's node is that of ``DRIVER``."""
        return await asyncio.to_thread(self._leaving) if self._config.cluster else {}

    def _leaving(self) -> dict[str, tuple[str, float]]:
        drained = draining_nodes()
        if not drained:
            return {}
        places = {DRIVER: ray.get_runtime_context().get_node_id()}
        for part in self.parts():
            told = ray._private.state.actors(part.actor._actor_id.hex())  # type: ignore[attr-defined]
            places[part.name] = (told.get("Address") or {}).get("NodeID", "")
        return {name: (node, drained[node]) for name, node in places.items() if node in drained}

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        addresses, references = addressed(payloads)
        answers = (ask("the object store", reference, LONG_SECONDS, "fetch") for reference in references)
        return resolved(addresses, await asyncio.gather(*answers))

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        return self.records.write_part(target, rows, payloads)

    def save_rollouts(self, target: Path, payloads: Sequence[Payload]) -> Future[None]:
        return self.records.save_rollouts(target, payloads)

    async def written(self, files: Sequence[Future[None]], tell: Callable[[str], None]) -> None:
        await self.records.written(files, tell)

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        kept = RolloutBundle(rollouts)
        reference = ray.put(kept)
        return [Payload(reference, i) for i in range(len(kept))]

    async def close(self) -> None:
        if not ray.is_initialized():
            return
        services: list[Any] = [*self.rewards, *self.references, *self.critics, *self.episodes]
        parts = [*self.generators, *services, *([self.learner] if hasattr(self, "learner") else [])]
        try:
            await asyncio.gather(*(part.close() for part in parts), return_exceptions=True)
            self.records.close()
            if hasattr(self, "_placer"):
                self._placer.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Stop the Ray that was started for the run, or leave the one that it joined."""
        if self._own_ray:
            give_back(self._own_ray)
        elif self._joined:
            shut_down()
        keep_to(self._cores_before, descendants=is_kept())
