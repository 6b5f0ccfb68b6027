"""The child's side of `make chaos`: one ``asyncrlhf train`` in a forked process, and the fault that meets one part."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
import torch

from asyncrlhf.cli.main import main
from asyncrlhf.cluster.parts import placement_plan, specs, wire_settings
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.orchestrator.controller import Controller
from tests.chaos.faults import Faults, FaultyRuntime

PARTS = ("generator", "reward", "reference", "critic", "learner", "record writer", "driver")
# What a kind may be done to; ``driver`` is struck by the parent.
SUITS = {
    "kill": PARTS,
    "freeze": PARTS[:-1],  # nobody is left to end a run whose driver is frozen for ever
    "freeze a while": PARTS,
    "slow": PARTS,
    "memory": PARTS[:-1],
    "interrupt": ("driver",),
    "disk full": ("record writer",),
    "nan": ("learner",),
}
LOCAL_KINDS = {
    "kill": ("kill",),
    "freeze": ("freeze", "hang", "unanswered"),
    "freeze a while": ("freeze a while", "late"),
    "slow": ("slow",),
    "memory": ("raise",),
}
EPISODES = 0.3  # share of the cases whose rollouts are episodes
EPISODE, STRUCK = "episode", ("kill", "freeze", "freeze a while", "slow", "memory")  # a part of theirs, and how
STALL_SECONDS = 10  # the runs' limit, under which they also have to go on after any fault
MEMORY_LEFT = 8 * 2**20  # bytes that a part may grow by when its memory is limited


@dataclass(frozen=True)
class Case:
    """What a seed draws. ``at``: the learner's version at which the fault strikes, -1 during the start; ``delay``
    seconds later."""

    seed: int
    runtime: str
    kind: str
    part: str
    at: int
    delay: float
    lasts: float
    signals: tuple[int, ...]
    overrides: tuple[str, ...]
    moment: str = ""  # instead of ``at``, by name (tests/chaos/moments.py)


def draw_case(seed: int, runtime: str) -> Case:
    rng = random.Random(f"{runtime}/{seed}")
    kinds = list(SUITS)
    kind = kinds[seed % len(kinds)]  # each kind and part in turn, whatever range is asked for
    part = SUITS[kind][seed // len(kinds) % len(SUITS[kind])]
    engine = "fake" if rng.random() < 0.7 or (runtime == "ray" and rng.random() < 0.5) else "hf"
    mode = rng.choice(("async", "async", "one_step", "sync", "fixed_lag"))
    steps = 12 if engine == "fake" else 8
    overrides = [
        f"seed={seed}", f"runtime={runtime}", f"async.mode={mode}", f"generator.engine={engine}", f"steps={steps}",
        "batch_size=16", "num_generations=4", "generator.slots=16", "generator.replicas=2", "reward.workers=2",
        "generator.max_completion_length=12", "checkpoint.every=3", "checkpoint.resume=auto", "eval_every=5",
        "task.heldout_size=4", f"stall_timeout_seconds={STALL_SECONDS}", "weights.timeout_seconds=5",
        "logging.wandb=disabled", "logging.progress=plain", "logging.report=false", "generator.threads=0",
        "logging.flush_every=32",
    ]  # fmt: skip
    if runtime == "local":
        overrides.remove("generator.threads=0")
        overrides.append("learner.virtual_step_seconds=0.1")
    if part == "critic":
        overrides += ["algorithm=ppo", "critic=service"]
    if part == "reference":
        overrides += ["reference=service", "algorithm.kl=loss", "algorithm.beta=0.1"]
    overrides.append("learner.learning_rate=" + ("1e9" if kind == "nan" else "1e-4"))
    part, more = _episodes(kind, part, random.Random(f"episodes {runtime}/{seed}"))
    overrides += more
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signals = tuple(int(rng.choice(numbers)) for _ in range(rng.choice((1, 1, 2))))
    at = rng.choice((-1, *range(steps - 3)))
    return Case(seed, runtime, kind, part, at, rng.uniform(0, 0.5), rng.uniform(1, 7), signals, tuple(overrides))


def _episodes(kind: str, part: str, rng: random.Random) -> tuple[str, list[str]]:
    """The part that is struck, and the settings of a case's episodes, if it has some: drawn beside the rest, so that
    what other cases draw stays."""
    if rng.random() > EPISODES:
        return part, []
    part = EPISODE if kind in STRUCK and part != "driver" and rng.random() < 0.6 else part
    return part, [
        "episode.environment=tests.worlds:Moody", "episode.workers=2", "episode.timeout_seconds=2",
        "generator.max_completion_length=40",
    ]  # fmt: skip


def child(case: Case, run_dir: str, told_to: str, address: str, limit: float, faulty: bool) -> NoReturn:
    """Run the command in this process, which was started for it, and end the process with its exit code."""
    code, told = 1, Path(told_to)
    try:
        os.setsid()
        output = os.open(told.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(0.9 * limit)  # where it hangs, if it does
        overrides = [*case.overrides, f"run_dir={run_dir}"]
        if case.runtime == "ray":
            overrides.append(f"ray.address={address}")
        if faulty and case.runtime == "local":
            inject_locally(case, told)
        elif faulty and case.moment:
            from tests.chaos.moments import inject_at_moment

            inject_at_moment(case, told)
        elif faulty:
            inject_on_ray(case, told)
        try:
            code = main(["train", *overrides])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def say(told: Path, **facts: Any) -> None:
    told.write_text(json.dumps(facts))


def inject_locally(case: Case, told: Path) -> None:
    """The same loops and workers on a runtime whose calls meet the fault; at most two of them."""
    if case.kind not in LOCAL_KINDS:
        return
    part = "record writer" if case.part == "record writer" else case.part
    kinds = LOCAL_KINDS[case.kind] if part != "record writer" else ("raise",)
    rng = random.Random(case.seed)
    faults = Faults(rng, kinds=kinds, parts=(part,), rate=rng.choice((0.02, 0.1, 0.3)), most=rng.choice((1, 2)))
    faults.tell = lambda text: say(told, struck=[str(f) for f in faults.fired], part=faults.fired[-1].part)

    def build(config: Any, run_dir: Path | None = None, workers: Any = None) -> Any:
        return FaultyRuntime(faults, specs(config, wire_settings(config, run_dir)), placement_plan(config).sharing)

    run_module.build_runtime = build  # type: ignore[assignment]


def controllers() -> list[Controller]:
    """The controller of the run, as soon as it is there."""
    seen: list[Controller] = []
    original = Controller.run

    async def run(self: Controller) -> Any:
        seen.append(self)
        return await original(self)

    Controller.run = run  # type: ignore[method-assign]
    return seen


def inject_on_ray(case: Case, told: Path) -> None:
    """Strike the process of a part from a thread beside the run."""
    seen = controllers()

    def strike() -> None:
        wait(lambda: seen)
        handles = lambda: targets(seen[0]._runtime, case.part)  # noqa: E731
        wait(handles)
        name, actor = handles()[case.seed % len(handles())]
        number = process_of(actor)  # asked early: on a crowded machine the answer takes longer than the run
        if case.at >= 0:
            wait(lambda: seen[0].state.version >= case.at and seen[0]._annotators)
        time.sleep(case.delay)
        now = handles()[case.seed % len(handles())]
        if now[1] is not actor:
            name, number = now[0], process_of(now[1])
        say(told, struck=[f"{case.kind} of {name} (process {number})"], part=name, pid=number)
        ACTS[case.kind](number, case)

    if case.kind in ACTS and case.part != "driver":
        threading.Thread(target=strike, daemon=True).start()


def process_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=300))


def wait(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.01)


def targets(runtime: Any, part: str) -> list[tuple[str, Any]]:
    """Name and actor of each live part of this kind."""
    if part == "record writer":
        return [(part, runtime.records.actor)] if runtime.records.actor is not None else []
    if part == "learner":
        return [(r.name, r.actor) for r in runtime.learner.ranks] if hasattr(runtime, "learner") else []
    handles: Sequence[Any] = getattr(runtime, f"{part}s")
    return [(handle.name, handle.actor) for handle in handles]


def kill(number: int, case: Case) -> None:
    os.kill(number, signal.SIGKILL)


def freeze(number: int, case: Case) -> None:
    os.kill(number, signal.SIGSTOP)


def freeze_a_while(number: int, case: Case) -> None:
    os.kill(number, signal.SIGSTOP)
    time.sleep(case.lasts)
    resume(number)


def slow(number: int, case: Case) -> None:
    """Four fifths of the time it stands still."""
    for _ in range(int(case.lasts / 0.5)):
        os.kill(number, signal.SIGSTOP)
        time.sleep(0.4)
        resume(number)
        time.sleep(0.1)


def memory(number: int, case: Case) -> None:
    """What it holds now is about all it gets."""
    held = psutil.Process(number).memory_info().vms
    resource.prlimit(number, resource.RLIMIT_AS, (held + MEMORY_LEFT, held + MEMORY_LEFT))


def resume(number: int) -> None:
    with suppress(ProcessLookupError):  # it may have been replaced meanwhile
        os.kill(number, signal.SIGCONT)


ACTS = {"kill": kill, "freeze": freeze, "freeze a while": freeze_a_while, "slow": slow, "memory": memory}


if __name__ == "__main__":
    drawn, *others = json.loads(sys.argv[1])
    child(Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in drawn.items()}), *others)
