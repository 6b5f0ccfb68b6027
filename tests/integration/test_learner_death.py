"""The learner dies at any moment of a run, on the virtual clock: the run goes on from its newest checkpoint, generators
stay up, and nothing that an undone version sampled is trained on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.actors.learner import LearnerSpec
from asyncrlhf.actors.messages import Offer
from asyncrlhf.cluster import local_runtime
from asyncrlhf.cluster.local_runtime import LocalLearner, LocalRuntime, Workers
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.learner.state.checkpoint import MODEL, TRAINER
from asyncrlhf.learner.state.state_file import STATE, split, write_file
from asyncrlhf.records.read.verify import verify
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.protocol import Ticket
from tests.loop import FAKE, Finished, meddle, run

STEPS = 12
COMMON = (*FAKE, f"steps={STEPS}", "generator.replicas=2", "learner.virtual_step_seconds=0.1")
TAIL = ("generator.fake.tail_probability=0.05", "generator.fake.latency_max_ratio=20")


class Imitation:
    """A learner with one weight and no model, which counts its steps and can be saved: a run of it costs little."""

    def __init__(self, spec: LearnerSpec) -> None:
        self.version, self._weight = 0, {"w": torch.zeros(1)}
        self._layout = spec.learner.layout
        self.sender = build_sender(spec.weights, "local", self._weight)

    def train(self, chosen: Any, *bundles: Any, **recorded: Any) -> StepResult:
        self.version += 1
        return StepResult({"loss": 0.0})

    def snapshot(self, probe: Any) -> Offer:
        return Offer(self.sender.snapshot(self.version, self._weight))

    def connect(self, endpoint: str, receivers: Any, epoch: int) -> None:
        self.sender.connect(endpoint, receivers, epoch)

    def ticket(self) -> Ticket:
        return self.sender.ticket()

    def transfer(self, ticket: Ticket) -> None:
        self.sender.transfer(ticket)

    def save(self, folder: Path) -> None:
        (folder / "version").write_text(str(self.version))
        (folder / MODEL).mkdir()
        head = {"layout": self._layout, "version": self.version, "critic": None, "ema": None}
        plain, tensors = split(head)
        write_file(folder / TRAINER, tensors, {STATE: json.dumps(plain)})

    def saved(self) -> Seals:
        return {}

    def load(self, folder: Path) -> None:
        self.version = int((folder / "version").read_text())


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runtime, "Workers", lambda: Workers(learner=Imitation))


def strike(monkeypatch: pytest.MonkeyPatch, verb: str, *versions: int, after: bool = False) -> list[int]:
    """Kill the learner once at each of ``versions`` of its worker, before (or ``after``) it does what ``verb`` says.
    Returns the versions at which it was struck."""
    struck: list[int] = []
    left = list(versions)

    def hit(learner: LocalLearner) -> None:
        if left and learner._killed is None and learner.worker.version == left[0]:
            struck.append(left.pop(0))
            learner.kill(f"struck in {verb}")

    call, snapshot = LocalLearner.call, LocalLearner.snapshot

    async def struck_call(
        self: LocalLearner, seconds: float, method: Callable[..., Any], /, *args: Any, **kw: Any
    ) -> Any:
        if method.__name__ == verb and not after:
            hit(self)
        try:
            return await call(self, seconds, method, *args, **kw)
        finally:
            if method.__name__ == verb and after:
                hit(self)

    def struck_snapshot(self: LocalLearner, probe: Any) -> Any:
        if verb == "snapshot":
            hit(self)
        return snapshot(self, probe)

    monkeypatch.setattr(LocalLearner, "call", struck_call)
    monkeypatch.setattr(LocalLearner, "snapshot", struck_snapshot)
    return struck


def journal(done: Finished, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (done.folder / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def assert_one_history(done: Finished, batch: int = 16, steps: int = STEPS) -> list[dict[str, Any]]:
    """Each step trained one batch, as metrics, ledger and rollouts say; none had a token of a version undone before it
    was given out. Returns the rollbacks."""
    done.assert_ledger_whole()
    assert done.summary["exit_reason"] == "done"
    assert [row["step"] for row in done.metrics] == list(range(1, steps + 1))
    uses = list(itertools.chain.from_iterable(done.trained.consumed_at_version))
    assert [uses.count(version) for version in range(steps)] == [batch] * steps
    assert done.summary["ledger"]["uses"] == batch * steps
    assert not journal(done, "died"), "a generator was restarted"
    assert verify(done.folder) == []
    rollbacks = journal(done, "rollback")
    for back in rollbacks:
        older = done.trained[done.trained.epoch < back["epoch"]]
        assert all(max(row.policy_versions) <= back["to"] for row in older.itertuples())
    for row in done.trained.itertuples():
        assert row.consumed_at_version[-1] - min(row.policy_versions) == row.staleness
    return rollbacks


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("verb", "version", "after"),
    [
        ("train", 8, False),
        ("train", 0, False),
        ("train", 7, True),
        ("snapshot", 8, False),
        ("ticket", 8, False),
        ("transfer", 8, True),
        ("save", 9, False),
    ],
)
@pytest.mark.usefixtures("imitated")
@pytest.mark.more_but(every=3)
def test_the_run_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, version: int, after: bool
) -> None:
    struck = strike(monkeypatch, verb, version, after=after)
    done = run(tmp_path, *COMMON, *TAIL, "checkpoint.every=3")
    assert struck == [version]
    (back,) = assert_one_history(done)
    assert back["epoch"] == 1 and version - after <= back["version"] <= version + 1
    assert back["to"] == min(6, version // 3 * 3)


@pytest.mark.usefixtures("imitated")
def test_what_was_not_sampled_by_an_undone_version_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow generators: at the moment of the rollback there is work in flight, in the buffer, trained and untrained."""
    struck = strike(monkeypatch, "train", 8)
    slow = ("generator.fake.latency_median=0.6", "generator.slots=32", "async.max_staleness=4")
    done = run(tmp_path, *COMMON, *TAIL, *slow, "checkpoint.every=6")
    assert struck == [8]
    (back,) = assert_one_history(done)
    assert (back["version"], back["to"]) == (8, 6)
    rows = done.rollouts
    lost = rows[rows.drop_reason == "rolled_back"]
    assert lost.generated_at.isna().any(), "something was in flight, and is dropped"
    kept = done.trained[(done.trained.epoch == 0) & (done.trained.consumed_at_version.str[-1] >= 6)]
    assert len(kept) > 16, "the batch under way, and what was trained since and sampled before"
    returned = {i for line in journal(done, "returned") for i in line["ids"]}
    assert returned and returned <= set(kept.rollout_id), "in the order of their training, none becomes too old"


@pytest.mark.parametrize(
    "options",
    [
        ("async.mode=fixed_lag", "async.lag=2"),
        ("async.mode=sync",),
        ("buffer.max_reuse=2", "async.max_staleness=3"),
        ("buffer.replay_fraction=0.5", "buffer.max_reuse=4", "buffer.warmup_steps=2", "async.max_staleness=3"),
        ("async.over_stale=wait",),
    ],
)
@pytest.mark.usefixtures("imitated")
@pytest.mark.more_but(every=3)
def test_deaths_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """In the midst of a step, then again beyond it; both times back to a checkpoint."""
    struck = strike(monkeypatch, "train", 5, 8)
    done = run(tmp_path, *COMMON, *TAIL, "checkpoint.every=3", *options)
    assert struck == [5, 8]
    backs = assert_one_history(done)
    assert [(back["version"], back["to"], back["epoch"]) for back in backs] == [(5, 3, 1), (8, 6, 2)]
    rolled_back = done.rollouts[done.rollouts.drop_reason == "rolled_back"]
    assert len(rolled_back) == done.summary["ledger"]["dropped"].get("rolled_back", 0)
    if "async.mode" in options[0]:
        assert len(rolled_back) == 0, "a schedule is done again with the same rollouts"
    else:
        assert len(rolled_back) > 0


def test_workers_of_the_critic_wait_for_its_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch, "train", 3)
    done = run(tmp_path, *COMMON, "steps=4", "checkpoint.every=2", "critic=service", "algorithm=ppo")
    (back,) = assert_one_history(done, steps=4)
    assert (back["version"], back["to"]) == (3, 2)


@pytest.mark.in_turn
@pytest.mark.more
def test_a_schedule_is_that_of_an_unbroken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("batch_size=32", "async.mode=fixed_lag", "async.lag=1", "steps=6", "checkpoint.every=2")
    whole = run(tmp_path / "whole", *options)
    strike(monkeypatch, "train", 3)
    broken = run(tmp_path / "broken", *options)
    (back,) = assert_one_history(broken, batch=32, steps=6)
    assert (back["version"], back["to"]) == (3, 2)
    assert broken.weights_digest() == whole.weights_digest()
    assert list(broken.trained.response) == list(whole.trained.response)
    assert broken.summary["ledger"] == whole.summary["ledger"]


@pytest.mark.usefixtures("imitated")
def test_without_a_checkpoint_the_run_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch, "train", 4)
    done = run(tmp_path, *COMMON, "checkpoint.every=0")
    (back,) = assert_one_history(done)
    assert (back["version"], back["to"]) == (4, 0)


@pytest.mark.usefixtures("imitated")
def test_a_fault_that_comes_back_ends_the_run_with_its_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = strike(monkeypatch, "train", 4, 7, 7, 7)
    with pytest.raises(ReplicaError, match=r"^learner-0 died: struck in train.* died 3 times at step 7 .*restarts=2"):
        run(tmp_path, *COMMON, "checkpoint.every=3", "max_restarts=2")
    assert struck == [4, 7, 7, 7], "a death before a step that was done since does not count"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"].startswith("failed: learner-0 died: struck in train")
    assert summary["ledger"]["adds_up"]


@pytest.mark.usefixtures("imitated")
def test_an_error_of_the_training_code_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: LocalLearner, rollouts: Any) -> Any:
        raise ValueError("a batch like that")

    monkeypatch.setattr(LocalLearner, "train", broken)
    with pytest.raises(ValueError, match="a batch like that"):
        run(tmp_path, *COMMON)
    assert not (tmp_path / "journal.jsonl").read_text().count('"rollback"')


@pytest.mark.usefixtures("imitated")
def test_the_learner_dies_while_a_generator_rejoins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_generator(runtime: LocalRuntime) -> None:
        asyncio.get_running_loop().call_later(0.73, lambda: runtime.generators[0].kill("struck by the test"))  # type: ignore[attr-defined]

    meddle(monkeypatch, kill_generator)
    struck: list[int] = []
    connect = LocalRuntime.connect

    async def dying(self: LocalRuntime, receivers: Any) -> None:
        if self._epoch == 1 and not struck:
            struck.append(self.learner.worker.version)
            self.learner.kill("struck in connect")
        await connect(self, receivers)

    monkeypatch.setattr(LocalRuntime, "connect", dying)
    done = run(tmp_path, *COMMON, *TAIL, "checkpoint.every=3")
    assert len(struck) == 1
    done.assert_ledger_whole()
    uses = list(itertools.chain.from_iterable(done.trained.consumed_at_version))
    assert [uses.count(version) for version in range(STEPS)] == [16] * STEPS
    assert len(journal(done, "died")) == 1 and len(journal(done, "joined")) == 1
    assert len(journal(done, "rollback")) == 1
    assert set(done.rollouts.generator_id[done.rollouts.epoch == 1].dropna()) == {"generator-0", "generator-1"}


@pytest.mark.usefixtures("imitated")
def test_a_resumed_run_goes_back_to_what_it_was_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, *COMMON, "steps=6", "checkpoint.every=6")
    strike(monkeypatch, "train", 8)
    done = run(tmp_path, *COMMON, "checkpoint.every=100", "checkpoint.resume=auto")
    (back,) = assert_one_history(done)
    assert (back["version"], back["to"]) == (8, 6)
