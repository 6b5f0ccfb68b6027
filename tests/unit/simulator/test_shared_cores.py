"""Parts that share cores: seconds added up by hand, and simulated runs that they slow down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.config.compose import load_config
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.cost_world import Conditions, Cores, SharedCores
from asyncrlhf.simulator.given import cores_of
from asyncrlhf.simulator.simulate import OVERRIDES, figures, simulate

RUN = (
    *OVERRIDES, "batch_size=64", "num_generations=4", "generator.slots=64", "generator.max_completion_length=64",
    "task.max_prompt_length=32", "logging.progress=none", "logging.report=false", "steps=16", "async.max_staleness=2",
)  # fmt: skip


def test_threads_beyond_the_cores_get_equal_shares() -> None:
    """One core: 1 s of work alone, then 2 s shared by two threads of 1 s and 2 s, then the rest of the second. Two
    threads of one part count twice."""

    async def ends(cores: float) -> list[float]:
        pool, clock = SharedCores(Cores(cores), lambda: None, lambda: None), asyncio.get_running_loop().time

        async def job(start: float, seconds: float, threads: int = 1) -> float:
            await asyncio.sleep(start)
            await pool.compute(seconds, threads)
            return clock()

        return list(await asyncio.gather(job(0.0, 2.0), job(1.0, 2.0), job(10.0, 1.0, 2)))

    assert run_virtual(ends(1)) == pytest.approx([3.0, 4.0, 12.0])
    assert run_virtual(ends(2)) == pytest.approx([2.0, 3.0, 11.0])
    # Other processes use half of the core.
    assert run_virtual(ends(0.5)) == pytest.approx([7.0, 8.0, 14.0])


def run(
    folder: Path, costs: Fitted, conditions: Conditions, *overrides: str, take_turns: bool = False
) -> dict[str, float]:
    config = load_config([*RUN, *overrides])
    simulate(config, costs, Workload(8, 64, 0.0, 64), folder, conditions, take_turns=take_turns)
    return figures(read_metrics(folder / "metrics.jsonl"), config.async_.bound, warm_up=8)


@pytest.mark.parametrize(("cores", "gain"), [(1, 1.0), (2, 2.0)])
def test_a_second_replica_is_worth_a_second_core(tmp_path: Path, cores: int, gain: float) -> None:
    """64 iterations of 10 ms per batch; half of the sequences take the same 10 ms."""
    costs, shared = Fitted((0.01, 0.0, 0.0), (0.01, 0.0)), Conditions(cores=Cores(cores))
    one = run(tmp_path / "one", costs, shared)
    two = run(tmp_path / "two", costs, shared, "generator.replicas=2", "generator.slots=64")
    assert one["step_seconds"] == pytest.approx(0.64, rel=0.03)
    assert one["step_seconds"] / two["step_seconds"] == pytest.approx(gain, rel=0.05)


@pytest.mark.in_turn
@pytest.mark.more
def test_each_call_takes_time_from_a_generator_on_the_controllers_core(tmp_path: Path) -> None:
    """10 ms for each call beside 0.64 s of decoding per batch; every second publish is left out, with its 5 calls."""
    free, costs = (Fitted((0.01, 0.0, 0.0), (0.1, 0.0), call=seconds) for seconds in (0.0, 0.01))
    one, lag = Conditions(cores=Cores(1)), "async.max_staleness=4"
    none = run(tmp_path / "none", free, one, lag)["step_seconds"]
    each = run(tmp_path / "each", costs, one, lag)["step_seconds"]
    second = run(tmp_path / "second", costs, one, lag, "weights.publish_every=2")["step_seconds"]
    assert each - second == pytest.approx(0.025, abs=0.005) and second > none


@pytest.mark.in_turn
@pytest.mark.more
def test_the_controllers_work_takes_time_from_a_generator_on_its_core(tmp_path: Path) -> None:
    """Per batch 0.64 s of decoding and 3 x 64 x 1 ms of messages: added up on one core, side by side on two."""
    costs = Fitted((0.01, 0.0, 0.0), (0.1, 0.0), message=1e-3)
    full, free = (run(tmp_path / str(n), costs, Conditions(cores=Cores(n)))["step_seconds"] for n in (1, 2))
    assert full == pytest.approx(0.64 + 0.192, rel=0.03)
    assert free < 0.95 * full
    learner = run(tmp_path / "learner", costs, Conditions(cores=Cores(1, learner=1)))
    assert learner["step_seconds"] == pytest.approx(0.64 + 0.192 + 0.1, rel=0.03)


@pytest.mark.in_turn
@pytest.mark.parametrize("cores", [None, Cores(2), Cores(2, learner=1)])
@pytest.mark.more_but(every=3)
def test_parts_that_take_turns_do_not_work_at_the_same_time(tmp_path: Path, cores: Cores | None) -> None:
    """Per batch 0.64 s of decoding and then 0.5 s of training, which slows nothing down that sleeps."""
    costs, slowed = Fitted((0.01, 0.0, 0.0), (0.5, 0.0)), Conditions(cores=cores, interference=(1.5, 1.5))
    turns = run(tmp_path / "turns", costs, slowed, take_turns=True)
    assert turns["step_seconds"] == pytest.approx(0.64 + 0.5, rel=0.03)
    assert (1 - turns["generator_idle"]) * turns["step_seconds"] == pytest.approx(0.64, rel=0.03)
    beside = run(tmp_path / "beside", costs, Conditions(cores=cores))
    assert beside["step_seconds"] < 0.7, "without turns both sides work at once"


def test_a_replica_with_more_work_sends_results_together(tmp_path: Path) -> None:
    """4 slots: 4 of 16 sequences end every 64 ms. While others run, their results wait up to a second for more, which
    makes them staler; the last ones do not wait, so a step takes as long."""
    costs, slots = Fitted((0.001, 0.0, 0.0), (0.001, 0.0)), ("generator.slots=4", "batch_size=16")
    quick, slow = (run(tmp_path / str(s), costs, Conditions(linger=s), *slots) for s in (0.0, 1.0))
    assert quick["step_seconds"] == pytest.approx(4 * 0.064, rel=0.01) == slow["step_seconds"]
    assert (quick["staleness"], slow["staleness"]) == (0.25, 0.5)


@pytest.mark.in_turn
@pytest.mark.more
def test_a_part_that_waits_for_its_core_finds_cold_caches(tmp_path: Path) -> None:
    """Two replicas on one core wait for half of the time: at 0.2 s more per second of it, 0.5 s of a core do the work
    of 0.4 s. A replica that has a core to itself never waits."""
    costs, two = Fitted((0.01, 0.0, 0.0), (0.01, 0.0)), ("generator.replicas=2", "generator.slots=64")
    warm, cold = (
        run(tmp_path / str(c), costs, Conditions(cores=Cores(1, cold=c)), *two)["step_seconds"] for c in (0.0, 0.2)
    )
    assert cold / warm == pytest.approx(0.5 / 0.4, rel=0.02)
    apart = run(tmp_path / "apart", costs, Conditions(cores=Cores(2, cold=0.2)), *two)["step_seconds"]
    assert apart == pytest.approx(warm / 2, rel=0.05)


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        ((), Cores(1)),
        (("generator.replicas=2",), Cores(2, learner=1)),
        (("generator.gpus=1",), None),
        (("runtime=local",), None),
    ],
)
def test_the_learner_has_a_core_where_the_others_leave_one(words: tuple[str, ...], cores: Cores | None) -> None:
    assert cores_of(load_config(list(words)), range(2)) == cores
