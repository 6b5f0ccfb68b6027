"""Which GPUs the jobs of a sweep get. Their number is faked: no card is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.sweeps import run as run_module
from asyncrlhf.sweeps.devices import VISIBLE, Devices, needs
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.record import SweepRecord
from asyncrlhf.sweeps.run import Sweeper
from asyncrlhf.sweeps.worker import Answer, Order, Worker

LOCAL = ("runtime=local", "async=fixed_lag")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(VISIBLE, raising=False)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ((), 0.0),
        (("learner.gpus=1", "generator.gpus=1"), 1.0),  # both on the process's first device
        (("reward.gpus=1",), 1.0),
        (("generator.groups={a:{gpus:1},b:{}}",), 1.0),
        (("learner.gpus=0.25", "generator.gpus=0.25"), 0.5),
        (("generator=vllm", "generator.gpus=2", "generator.vllm.tensor_parallel_size=2"), 2.0),
    ],
)
def test_a_local_job_needs_one_core_and_the_devices_of_one_process(overrides: tuple[str, ...], gpus: float) -> None:
    assert needs(load_config([*LOCAL, *overrides])) == (1.0, gpus)


def test_a_job_on_ray_needs_what_its_parts_ask_for() -> None:
    assert needs(load_config(["learner.gpus=1", "generator.gpus=1"]))[1] == 2.0


def test_whole_devices_are_distinct_and_shares_are_packed(three_gpus: None) -> None:
    devices = Devices.of([load_config([*LOCAL, "learner.gpus=1"])])
    first, half, other_half = devices.take(1.0), devices.take(0.5), devices.take(0.5)
    assert len({*first, *half}) == 2 and half == other_half
    last = devices.take(1.0)
    assert {*first, *half, *last} == {"0", "1", "2"} and not devices.fit(0.5) and devices.fit(0.0)
    devices.free(half, 0.5)
    assert not devices.fit(1.0) and devices.take(0.5) == half
    devices.free(first, 1.0)
    devices.free(last, 1.0)
    assert {*devices.take(2.0)} == {*first, *last}


def test_without_a_job_on_a_gpu_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("looked"))
    assert Devices.of([load_config([*LOCAL])]).take(0.0) == ()


def test_more_gpus_than_there_are_is_one_sentence(three_gpus: None) -> None:
    config = load_config(["learner.gpus=1", "generator.gpus=1", "generator.replicas=3"])
    with pytest.raises(ConfigError, match="asks for 4 GPUs; torch sees 3"):
        Devices.of([config])


class Pretend:
    """A worker that runs nothing: at each wait of the sweep the oldest job under way ends."""

    made: ClassVar[list[Pretend]] = []
    seen: ClassVar[list[dict[str, tuple[str, ...]]]] = []  # at each start: the jobs under way with their devices
    ending: ClassVar[Pretend | None] = None

    def __init__(self, devices: tuple[str, ...], forks: bool) -> None:
        assert not forks, "the sweep's jobs may use a GPU"
        self.devices, self.busy_with, self.waits, self.process, self.jobs = devices, None, (), self, 0
        self.made.append(self)

    def is_alive(self) -> bool:
        return self in self.made

    def give(self, order: Order, job: Any) -> None:
        self.busy_with, self.jobs = job, self.jobs + 1
        self.seen.append({w.busy_with.name: w.devices for w in self.made if w.busy_with is not None})

    def answer(self) -> Answer | None:
        return Answer("done", 1.0) if self.ending is self else None

    def close(self, seconds: float) -> None:
        if self in self.made:
            self.made.remove(self)


def starts(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Sequence[dict[str, tuple[str, ...]]]:
    """The jobs under way with their devices, at each start of one."""
    Pretend.made, Pretend.seen = [], []

    def one_ends(sources: object, timeout: float) -> None:
        Pretend.ending = next(worker for worker in Pretend.made if worker.busy_with is not None)

    monkeypatch.setattr(run_module, "Worker", Pretend)
    monkeypatch.setattr(run_module, "wait", one_ends)
    monkeypatch.setattr(run_module.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(Sweeper, "_ray_address", lambda self: "there")
    plan = plan_sweep(overrides)
    folder.mkdir(exist_ok=True)
    record = SweepRecord(folder, plan)
    table: Any = type("Silent", (), {"show": lambda *_: None, "ended": lambda *_: None})()
    Sweeper(plan, record, table).run()
    assert {job.state for job in record.jobs.values()} == {"done"}
    return Pretend.seen


def test_local_jobs_side_by_side_get_distinct_devices_of_those_that_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_gpus: None
) -> None:
    monkeypatch.setenv(VISIBLE, "4, 6,GPU-ab")
    seen = starts(tmp_path, monkeypatch, *LOCAL, "learner.gpus=1", "generator.gpus=1", "seeds=7")
    assert len(seen) == 7 and max(map(len, seen)) == 3
    for under_way in seen:
        devices = [name for own in under_way.values() for name in own]
        assert len(devices) == len(set(devices)) == len(under_way), under_way
    assert {name for under_way in seen for own in under_way.values() for name in own} == {"4", "6", "GPU-ab"}
    # A device is given to the next job when its own has ended.
    assert [len(under_way) for under_way in seen] == [1, 2, 3, 3, 3, 3, 3]


def test_jobs_without_gpus_and_jobs_on_ray_see_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_gpus: None
) -> None:
    seen = starts(tmp_path, monkeypatch, *LOCAL, "learner.gpus=0,1", "seeds=4")
    devices = {name: own for under_way in seen for name, own in under_way.items()}
    assert {len(own) for name, own in devices.items() if "gpus=0" in name} == {0}
    assert {len(own) for name, own in devices.items() if "gpus=1" in name} == {1}
    ray = starts(tmp_path / "ray", monkeypatch, "runtime=ray", "learner.gpus=1", "seeds=4")
    assert max(map(len, ray)) == 3 and {own for under_way in ray for own in under_way.values()} == {()}


def test_local_jobs_on_gpus_do_not_run_beside_those_that_ray_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_gpus: None
) -> None:
    seen = starts(tmp_path, monkeypatch, "runtime=local,ray", "learner.gpus=1", "seeds=2")
    assert len(seen) == 4 and all(len({len(own) for own in under_way.values()}) == 1 for under_way in seen)


@pytest.mark.thorough
def test_the_worker_sees_its_devices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "9")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tells_devices.py").write_text(
        "import os\nfrom pathlib import Path\n"
        f"Path(__file__).with_suffix('.txt').write_text(os.environ['{VISIBLE}'])\n"
        "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    worker = Worker(("5", "GPU-ab"))
    small = ("generator.engine=fake", "num_generations=2", "batch_size=4", "generator.slots=4", "steps=1")
    own = ("reward.kind=python", "reward.target=tells_devices:length", f"run_dir={tmp_path / 'run'}")
    quiet = ("task.heldout_size=2", "logging.wandb=disabled", "logging.progress=plain", "logging.report=false")
    worker.give(Order((*LOCAL, *small, *own, *quiet), None, str(tmp_path / "log"), "", 1), "job")
    run_module.wait(worker.waits, timeout=120)
    answer = worker.answer()
    worker.close(5.0)
    assert answer is not None and answer.state == "done", answer
    assert (tmp_path / "tells_devices.txt").read_text() == "5,GPU-ab"
