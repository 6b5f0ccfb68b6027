"""Whole runs on the virtual clock under seeded faults: real loops, ledger, buffer and checkpoints, imitated parts.

    python -m tests.chaos.simulation --seeds 0-1999
    python -m tests.chaos.simulation --seed 17 --trace     one run again, with all that happened

A seed draws the settings, the faults, and where the run is stopped or crashes. What does not end as done is resumed
from its newest checkpoint, the last time without faults, so that every seed ends with all its steps trained.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.local_runtime import Workers
from asyncrlhf.cluster.parts import placement_plan, specs, wire_settings
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.own_time import OwnTime
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from asyncrlhf.records.write.checkpoint import list_checkpoints, read_checkpoint
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.run_lock import LOCK_FILE
from asyncrlhf.types import Prompt, SamplingParams
from tests.chaos.faults import KINDS, Fault, Faults, FaultyRuntime, SpinError
from tests.chaos.oracle import Sleepers, end_broken, idle, now_broken, untrue
from tests.chaos.parts import Generator, Learner, Scorer, World
from tests.chaos.scenes import Scene

QUIET = ("runtime=local", "logging.wandb=disabled", "logging.progress=none", "logging.report=false")
BASE = ("generator.engine=fake", "learner.virtual_step_seconds=0", "weights.timeout_seconds=5",
        "stall_timeout_seconds=20", "max_failure_fraction=0.9")  # fmt: skip
SERVICES = {
    "none": (),
    "reference": ("reference=service", "algorithm.kl=loss", "algorithm.beta=0.1"),
    "critic": ("algorithm=ppo", "critic=service"),
    "both": ("algorithm=ppo", "critic=service", "reference=service", "algorithm.kl=loss", "algorithm.beta=0.1"),
}
PULLS = 0.3  # share of the free-running seeds whose replicas pull
EPISODES = 0.25  # share of the seeds whose rollouts are episodes
SHORT_SECONDS = 4.0  # of an episode, with waits for its turns: too few while a part is replaced
LIMIT_SECONDS = 2000.0  # of one session, on the virtual clock
CLOSE_SECONDS = 100.0  # of its end
LOOK_SECONDS = 0.2
SPIN_SECONDS = 60  # of the real clock
IDLE_SECONDS = 4.0
SESSIONS = 5


@cache
def base(services: str) -> RunConfig:
    return load_config([*QUIET, *BASE, *SERVICES[services]])


def draw_config(rng: random.Random, seed: int) -> RunConfig:
    """Settings that may stand together."""
    more = random.Random(f"more of {seed}")  # beside the rest, so that what a seed drew before stays
    while True:
        try:
            config = _draw_config(rng, seed)
        except ConfigError:
            continue
        return replace(
            config,
            logging=replace(config.logging, flush_every=more.choice((5, 20, 1000))),
            max_restarts=more.choice((0, 1, 3, 3)),
        )


def _draw_config(rng: random.Random, seed: int) -> RunConfig:
    found = base(rng.choice(("none", "none", "reference", "critic", "both")))
    size, groups = rng.choice((2, 2, 4)), rng.choice((2, 3, 4))
    staleness = rng.choice((0, 1, 2, 2, 4))
    return replace(
        found,
        seed=seed,
        steps=rng.choice((3, 5, 8)),
        batch_size=size * groups,
        num_generations=size,
        eval_every=rng.choice((0, 2)),
        async_=replace(
            found.async_,
            mode=(mode := rng.choice(("async", "async", "async", "sync", "one_step", "fixed_lag"))),
            max_staleness=staleness if mode == "async" else None,
            lag={"fixed_lag": rng.choice((0, 1, 3))}.get(mode),  # drawn in every mode: what a seed draws next stays
            pacing=rng.choice(("fill", "fill", "just_in_time")),
            on_weight_update=rng.choice(("drain", "interrupt", "in_flight")),
            over_stale=rng.choice(("drop", "drop", "mask", "wait", "downweight")),
            adaptive=rng.random() < 0.15,
        ),
        buffer=replace(
            found.buffer,
            sampling=rng.choice(("fifo", "fifo", "lifo", "uniform", "reward_spread")),
            max_reuse=rng.choice((1, 1, 2)),
            replay_fraction=rng.choice((0.0, 0.0, 0.0, 0.5)),
            capacity=rng.choice((0, 0, 2 * size * groups)),
        ),
        generator=replace(
            found.generator,
            replicas=rng.choice((1, 2, 2, 3, 8)),
            slots=(rng.choice((2, 4, 8)), rng.choice((0, 1, 3)))[0],  # a spare draw: what a seed draws next stays
        ),
        weights=replace(found.weights, publish_every=rng.choice((1, 1, 2))),
        reward=replace(found.reward, workers=(rng.choice((1, 2)), rng.choice((0, 2)))[0]),
        reference=replace(found.reference, workers=rng.choice((1, 2)) if found.reference_served else 0),
        critic=replace(found.critic, workers=rng.choice((1, 2)) if found.critic_served else 0),
        fusion=replace(
            found.fusion, granularity=rng.choice(("rollout", "group", "batch")), max_wait_ms=rng.choice((0.0, 5.0))
        ),
        checkpoint=replace(found.checkpoint, every=rng.choice((0, 1, 2)), keep=2),
        cluster=replace(found.cluster, placement=rng.choice(("auto", "auto", "auto", "flatten"))),
    )


def draw_pull(config: RunConfig, seed: int, sure: bool) -> tuple[RunConfig, int]:
    """With pull in some of the runs that may have it, and the number of machines. Drawn beside the rest."""
    rng = random.Random(f"pull of {seed}")
    able = config.async_.mode == "async" and config.cluster.placement != "flatten"
    if not able or not (sure or rng.random() < PULLS):
        return config, 1
    pulling = replace(config.async_, on_weight_update="pull")
    return replace(config, async_=pulling, weights=replace(config.weights, transport="relay")), rng.choice((1, 2, 3))


def draw_episodes(seed: int, sure: bool) -> tuple[EpisodeConfig, int, int] | None:
    """The settings of episodes, one episode in how many is odd, and one in how many ends its worker; None if rollouts
    are plain answers. Drawn beside the rest, so that what a seed drew before stays."""
    rng = random.Random(f"with episodes {seed}")
    if rng.random() > EPISODES and not sure:
        return None
    config = EpisodeConfig(
        environment="tests.chaos.scenes:Play",
        workers=rng.choice((1, 2, 3)),
        concurrency=rng.choice((0, 0, 8)),
        max_turns=rng.choice((2, 8)),
        timeout_seconds=2.0,
        episode_seconds=rng.choice((SHORT_SECONDS, 100.0)),
    )
    return config, rng.choice((0, 0, 15)), rng.choice((0, 0, 60))


def draw_faults(rng: random.Random, seed: int, session: int, episodes: bool = False) -> Faults:
    """Few kinds at a time find more than all at once: one fault does not hide what another would show."""
    if session >= 2:
        return Faults(random.Random(0))
    parts = rng.choice(
        (
            (),
            (),
            ("generator",),
            ("generator-0",),
            ("reward", "reference", "critic"),
            ("weight", "learner", "generator"),
        )
    )
    drawn = Faults(
        random.Random(rng.random()),
        kinds=rng.sample(KINDS, rng.choice((1, 2, 4))),
        parts=parts,
        rate=rng.choice((0.01, 0.03, 0.1)),
        most=rng.choice((1, 2, 4, 8)),
        crash_at=rng.randrange(5, 400) if rng.random() < 0.25 else -1,
    )
    if random.Random(f"learner {seed}/{session}").random() < 0.25:  # it alone dies, and the run goes back
        return replace(drawn, kinds=("kill", "freeze"), parts=("learner",), rate=0.05)
    if episodes and random.Random(f"episode workers {seed}/{session}").random() < 0.4:
        return replace(drawn, parts=("episode",))
    return drawn


@dataclass
class Session:
    """One process's part of a run, and what it left."""

    reason: str = "failed"
    error: BaseException | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    faults: Sequence[Fault] = ()
    seconds: float = 0.0


@dataclass
class Result:
    """Of a seed. ``broken``: sentences of what does not hold."""

    seed: int
    sessions: list[Session] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Fault]:
        return [fault for session in self.sessions for fault in session.faults]


def simulate(
    seed: int, tell: Callable[[str], None] = lambda text: None, told_passes: bool = False, episodes: bool = False,
    pulls: bool = False,
) -> Result:  # fmt: skip
    """The run of this seed, resumed until it is done. ``episodes``: its rollouts are episodes in any case; ``pulls``:
    its replicas pull if they may."""
    rng = random.Random(seed)
    config, result, resumed_at = draw_config(rng, seed), Result(seed), []
    config, machines = draw_pull(config, seed, pulls)
    drawn = draw_episodes(seed, episodes)
    config = config if drawn is None else replace(config, episode=drawn[0])
    fails = rng.choice((0, 0, 0, 15))
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    # Like an agent's, an episode here may be late, and end, while a turn of it is being sampled.
    with tempfile.TemporaryDirectory(dir=place) as folder, patch.object(OwnTime, "around", lambda self, sample: sample):
        run_dir = Path(folder) / "run-0"
        for number in range(SESSIONS):
            faults, world = (
                draw_faults(rng, seed, number, drawn is not None),
                World(fails_one_in=fails, machines=machines),
            )
            if drawn is not None:
                world.odd_one_in, world.deadly_one_in = drawn[1], drawn[2] if number < 2 else 0
                world.episodes_fail = any(drawn[1:]) or drawn[0].episode_seconds == SHORT_SECONDS
                seconds = drawn[0].episode_seconds if number < 2 else LIMIT_SECONDS  # it runs while turns are sampled
                config = replace(config, episode=replace(drawn[0], episode_seconds=seconds))
            stop_at = rng.uniform(0.0, 8.0) if number < 2 and rng.random() < 0.2 else None
            faults.tell, faults.told_passes = tell, told_passes
            checkpoints = list_checkpoints(run_dir)
            if not checkpoints:
                resumed_at.clear()
                run_dir = Path(folder) / f"run-{number}"  # a run without a checkpoint begins again
            else:
                resumed_at.append(int(checkpoints[-1].name.rpartition("-")[2]))
            tell(f"--- session {number} of seed {seed}: {run_dir.name} from {resumed_at[-1:] or 'the beginning'}")
            session = SessionRun(config, run_dir, world, faults, stop_at, tell).run()
            result.sessions.append(session)
            result.broken += session.broken
            if session.reason == "crashed":
                run_dir = run_dir.with_name(run_dir.name + "-crashed")
            if session.reason == "done":
                result.broken += end_broken(config, run_dir, world, session.counts, resumed_at)
            if session.reason == "done" or result.broken:
                break
        last = result.sessions[-1]
        # Failed rollouts of a schedule stay failed when the run is resumed.
        spoilt = drawn is not None and "Every rollout of the batch" in str(last.error)
        if last.reason != "done" and not result.broken and not spoilt:
            result.broken.append(f"after {SESSIONS} sessions the run is not done")
    return result


@contextmanager
def spin_watched() -> Iterator[None]:
    """Where virtual time stands still for a minute something goes round and never awaits."""

    def spin(number: int, frame: Any) -> None:
        raise SpinError("".join(traceback.format_stack(frame)[-4:]))

    before = signal.signal(signal.SIGALRM, spin)
    signal.alarm(SPIN_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class SessionRun:
    """One process of the run, from the newest checkpoint to its end."""

    config: RunConfig
    run_dir: Path
    world: World
    faults: Faults
    stop_at: float | None
    tell: Callable[[str], None]
    ended: Session = field(default_factory=Session)

    def run(self) -> Session:
        saved = next((read_checkpoint(folder) for folder in reversed(list_checkpoints(self.run_dir))), None)
        recorder = RunRecorder(self.run_dir, {}, self.config.logging, saved.marker if saved is not None else None)
        try:
            with spin_watched():
                run_virtual(self._main(recorder, saved))
        except SpinError as error:
            self.ended.broken.append(f"the loops go round without end: {error}")
        finally:
            recorder._lock.release()
            recorder._metrics.close()
        self.ended.faults = self.faults.fired
        return self.ended

    async def _main(self, recorder: RunRecorder, saved: Any) -> None:
        loop, config, ended = asyncio.get_running_loop(), self.config, self.ended
        loop.set_exception_handler(self._unseen)
        self.faults.tell = lambda text: self.tell(f"{loop.time():9.3f}  {text}")
        workers = Workers(
            generator=lambda spec, clock: Generator(self.world, spec, clock),
            learner=lambda spec: Learner(self.world),
            annotator=lambda spec, name: Scorer(self.world, spec.kind),
            episodes=lambda spec, name: self._scene(spec, name, lambda: runtime).worker(name),
        )
        wanted = specs(config, wire_settings(config, self.run_dir))
        runtime = FaultyRuntime(self.faults, wanted, placement_plan(config).sharing, workers)
        sampling = SamplingParams(max_completion_length=200 if config.episode.used else 8)
        heldout: Any = HeldOut([_prompt(-1), _prompt(-2)], sampling, runtime)
        source = PromptSource(_prompt, None, config.seed)
        controller = Controller(config, runtime, source, sampling, heldout, recorder, self._view(), 10, saved)
        running = asyncio.create_task(self._run(controller), name="run")
        controller.state.settings = {}  # a copy of them costs as much as the run, and no test reads it
        self.faults.crash = lambda: self._crash(running)
        checking = asyncio.create_task(self._check(controller, runtime, running), name="check")
        if self.stop_at is not None:
            loop.call_later(self.stop_at, lambda: self.faults.tell(f"STOP: {controller.stop('its limit')}"))
        await asyncio.wait([running])
        checking.cancel()
        await asyncio.wait([checking])
        ended.counts, ended.seconds = controller.state.ledger.counts(), loop.time()
        self.faults.tell(f"{ended.reason} {ended.error or ''}")
        self.faults.rate = 0.0
        await self._close(controller, runtime)

    def _scene(self, spec: Any, name: str, runtime: Callable[[], FaultyRuntime]) -> Scene:
        def strike(what: str) -> None:
            self.faults.tell(f"the environment of an episode at {name} {what}")
            worker: Any = next(worker for worker in runtime().episodes if worker.name == name)
            worker.die(f"its environment {what}") if what == "exits" else worker.freeze()

        return Scene(spec.settings, self.world.odd_one_in, self.world.deadly_one_in, strike)

    def _unseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task ended in an exception that nothing awaited: a bug, unless it is one of ours or the disk's."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, (AsyncRLHFError, OSError)):
            self.ended.broken.append(f"{context['message']}: {error!r}")

    async def _run(self, controller: Controller) -> None:
        ended = self.ended
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                ended.reason = (await controller.run()).reason
        except TimeoutError:
            ended.broken.append(f"the run did not end within {LIMIT_SECONDS:g} s: {controller._diagnosis(False)}")
        except asyncio.CancelledError:
            if ended.reason == "failed":
                ended.reason = "interrupted"  # while it started
        except Exception as error:
            ended.error = error
            failures = (
                bool(self.world.fails_one_in)
                or self.world.episodes_fail
                or any(f.part[:3] in ("rew", "ref", "cri", "epi") for f in self.faults.fired)
            )
            if sentence := untrue(error, self.faults.fired, failures, bool(self.world.deadly_one_in)):
                ended.broken.append(sentence)
        if ended.reason == "interrupted" and self.stop_at is None:
            ended.broken.append("the run was interrupted by nobody")

    def _crash(self, running: asyncio.Task[None]) -> None:
        """The process is gone with all it knew; its folder stays as it is now."""
        self.faults.tell("CRASH")
        kept = self.run_dir.with_name(self.run_dir.name + "-crashed")

        def copied(source: str, target: str) -> None:
            with suppress(FileNotFoundError):  # a part that gets its name just now
                shutil.copy2(source, target)

        shutil.copytree(self.run_dir, kept, ignore=shutil.ignore_patterns(LOCK_FILE), copy_function=copied)
        self.ended.reason = "crashed"
        running.cancel()

    async def _check(self, controller: Controller, runtime: FaultyRuntime, running: asyncio.Task[None]) -> None:
        idle_since, sleepers = None, Sleepers(controller)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not controller._annotators:
                continue
            broken = [*now_broken(controller), *sleepers.broken()]
            now = asyncio.get_running_loop().time()
            idle_since = (idle_since or now) if idle(runtime, self.faults) else None
            if idle_since is not None and now - idle_since > IDLE_SECONDS:
                broken.append(f"for {IDLE_SECONDS:g} s no part has anything to do: {controller._diagnosis(False)}")
            if broken:
                self.ended.broken += [f"at {now:.1f} s {sentence}" for sentence in broken]
                self.ended.reason = "broken"
                running.cancel()
                return

    async def _close(self, controller: Controller, runtime: FaultyRuntime) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await controller.close()
                await runtime.close()
        except TimeoutError:
            self.ended.broken.append(f"the parts did not close within {CLOSE_SECONDS:g} s")
        for _ in range(20):
            await asyncio.sleep(0)
        # What a failed run still had under way ends with its event loop.
        left = sorted(t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task())
        if left and self.ended.reason == "done":
            self.ended.broken.append(f"tasks are left: {left}")

    def _view(self) -> Any:
        return SimpleNamespace(
            stage=lambda name: None,
            begin=lambda: None,
            step=lambda metrics: self.faults.tell(f"step {metrics['step']} is recorded"),
            message=lambda text: self.faults.tell(text),
            published=lambda version: None,
            stop_asked=False,
            evaluated=lambda version, accuracy: None,
            evaluated_apart=lambda version, seconds, accuracy: None,
        )


def _prompt(index: int) -> Prompt:
    return Prompt(f"p{index}", f"prompt {index}", np.ones(2, np.int64))


def seeds_of(text: str) -> Iterator[int]:
    """``3``, ``0-199`` or ``1,5,7-9``."""
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", "--seed", default="0-199")
    parser.add_argument("--episodes", action="store_true", help="all rollouts are episodes, not those of some seeds")
    parser.add_argument("--trace", action="store_true", help="tell what happens")
    parser.add_argument("--calls", action="store_true", help="tell every call of a part, too")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", RuntimeWarning)  # of calls that a run's end left unmade
    tell: Callable[[str], None] = print if given.trace or given.calls else lambda text: None
    began, broken, ends, faults, count = time.monotonic(), 0, [], 0, 0
    for seed in seeds_of(given.seeds):
        result = simulate(seed, tell, given.calls, given.episodes)
        count, faults = count + 1, faults + len(result.faults)
        ends += [session.reason for session in result.sessions]
        if result.broken:
            broken += 1
            print(f"seed {seed}: {'; '.join(map(str, result.faults)) or 'no fault'}", *result.broken, sep="\n    ")
    shares = ", ".join(f"{ends.count(reason)} {reason}" for reason in sorted(set(ends)))
    seconds = f"{time.monotonic() - began:.1f} s, {time.process_time():.1f} s of a processor"
    print(f"{count} seeds, {faults} faults, sessions: {shares}; {broken} seeds broke a promise; {seconds}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
