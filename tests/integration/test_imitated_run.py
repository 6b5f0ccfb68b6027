"""A run whose workers only let virtual time pass: the real controller, neither a model nor an engine, known times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import Outbox
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.local_runtime import Workers
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.engine import StepOutput
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.types import Annotation, GenerationRequest, Payload, Rollout, WeightManifest
from tests.integration.test_spans import assert_tiled, lanes_of
from tests.loop import FAKE, QUIET

SAMPLE, TRANSFER, LOAD, TRAIN = 2.0, 0.5, 0.25, 4.0  # seconds that each costs
ANNOTATE = {"reward": 0.0, "reference": 1.0, "critic": 1.5}  # seconds of a call
STEPS = 6
SERVED = (
    "algorithm=ppo", "algorithm.kl=reward", "algorithm.beta=0.1", "reference=service", "critic=service",
)  # fmt: skip


class Generator:
    """Every rollout takes ``SAMPLE`` seconds, beside all others."""

    def __init__(self, spec: Any, clock: Callable[[], float]) -> None:
        self.name, self.clock, self.outbox = spec.name, clock, Outbox()
        self.tokens, self.busy_seconds, self.version = 0, 0.0, -1
        self.due: dict[int, tuple[float, GenerationRequest]] = {}

    def worked(self, seconds: float) -> None:
        self.busy_seconds += seconds

    def submit(self, items: Sequence[GenerationRequest]) -> None:
        self.due |= {item.rollout_id: (self.clock() + SAMPLE, item) for item in items}

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        return [i for i in rollout_ids if self.due.pop(i, None)] + self.outbox.withdraw(rollout_ids)

    @property
    def running(self) -> int:
        return len(self.due)

    def has_work(self) -> bool:
        return bool(self.due)

    def step(self) -> StepOutput:
        done = [item for at, item in self.due.values() if at <= self.clock() + 1e-9]
        self.outbox.put([self._rollout(item) for item in done], self.clock())
        for item in done:
            del self.due[item.rollout_id]
        return StepOutput(done, wake_at=min((at for at, _ in self.due.values()), default=None))  # type: ignore[arg-type]

    def _rollout(self, item: GenerationRequest) -> Rollout:
        number, one = item.rollout_id, np.zeros(1, np.float32)
        ids, versions = np.ones(1, np.int64), np.full(1, self.version)
        return Rollout(number, item.group_id, item.prompt, ids, one, versions, "stop", "", self.name)

    def receive(self, ticket: Any) -> None:
        """The learner's transfer has taken the time."""

    async def load(self, version: int, cache: str) -> None:
        await asyncio.sleep(LOAD)
        self.version = version


class Learner:
    version = 0

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Nothing is sent."""

    def snapshot(self, probe: Any) -> Offer:
        return Offer(0.0)

    def ticket(self) -> Any:
        return SimpleNamespace(version=self.version, manifest=WeightManifest((), ()))

    critic_ticket = ticket

    async def transfer(self, ticket: Any) -> None:
        await asyncio.sleep(TRANSFER)

    async def train(self, chosen: Sequence[Any], *bundles: Any, **recorded: Any) -> StepResult:
        await asyncio.sleep(TRAIN)
        self.version += 1
        return StepResult({"loss": 0.0})


class Annotator:
    """Each call takes the seconds of its kind."""

    def __init__(self, spec: Any, name: str) -> None:
        self.kind = spec.kind

    async def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], list[Any]]:
        await asyncio.sleep(ANNOTATE[self.kind])
        if self.kind == "reward":
            return [Annotation(r.rollout_id, float(r.rollout_id % 2)) for r in rollouts], []
        places = [Annotation(r.rollout_id, arrays=Payload(None, i)) for i, r in enumerate(rollouts)]
        return places, [{} for _ in rollouts]


def imitate(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run whose parts are the workers above."""
    settings = (f"run_dir={folder}", "runtime=local", *QUIET, *FAKE, f"steps={STEPS}", "fusion.max_wait_ms=0")
    config = load_config([*settings, "learner.virtual_step_seconds=0", *overrides])
    prepared = prepare(config)
    recorder = RunRecorder(folder, {}, config.logging, None)
    silent = {
        name: lambda *_: None
        for name in ("stage", "begin", "step", "message", "published", "evaluated", "evaluated_apart")
    }
    view: Any = SimpleNamespace(**silent, stop_asked=False)

    async def main() -> None:
        workers = Workers(generator=Generator, learner=lambda spec: Learner(), annotator=Annotator)
        runtime = build_runtime(config, folder, workers)
        heldout = HeldOut([], prepared.sampling, runtime)
        source = prepared.task.train_source(config.seed)
        controller = Controller(config, runtime, source, prepared.sampling, heldout, recorder, view, vocab_size=10)
        try:
            assert (await controller.run()).reason == "done"
        finally:
            await controller.close()
            await runtime.close()

    run_virtual(main())
    recorder.finish({})
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("mode", "step_seconds"),
    [
        # One after the other: weights, a batch, the step.
        (("async.mode=sync",), TRANSFER + LOAD + SAMPLE + TRAIN),
        # Reference and critic answer side by side: the slower one counts.
        (("async.mode=sync", *SERVED), TRANSFER + LOAD + SAMPLE + max(ANNOTATE.values()) + TRAIN),
        # Generation and transfers run beside the step, which alone counts.
        (("async.mode=async", "async.max_staleness=2"), TRAIN),
    ],
    ids=["sync", "served", "async"],
)
def test_the_steps_of_an_imitated_run_take_what_their_parts_cost(
    tmp_path: Path, mode: tuple[str, ...], step_seconds: float
) -> None:
    metrics = imitate(tmp_path, *mode, "generator.replicas=2")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    ends = [row["wall_time"] for row in metrics]
    assert np.diff(ends)[1:] == pytest.approx(step_seconds)
    assert all(row["train_seconds"] == pytest.approx(TRAIN) for row in metrics)
    lanes = lanes_of(tmp_path)
    costs = {"train": TRAIN, "transfer": TRANSFER, "load": LOAD}
    costs |= {kind: seconds for kind, seconds in ANNOTATE.items() if f"{kind}-0" in lanes and kind != "reward"}
    for part, lane in lanes.items():
        assert_tiled(lane)
        for kind, seconds in costs.items():
            found = lane[(lane.kind == kind) | ((lane.kind == "score") & part.startswith(kind))]
            np.testing.assert_allclose(found.end - found.start, seconds, atol=1e-9, err_msg=f"{part} {kind}")
    assert len(lanes["learner-0"].query("kind == 'train'")) == STEPS
    assert len(lanes["publisher"].query("kind == 'transfer'")) == STEPS
    assert ("reference-0" in lanes) == (SERVED[0] in mode)
