"""``asyncrlhf profile`` by measuring: it finds the costs that the parts have, and a plan goes by them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.parts import specs
from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import prepare, train
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.ranking import Subject, estimate
from asyncrlhf.planner.shapes import ModelShape, Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.simulator.cost_runtime import CostRuntime
from asyncrlhf.simulator.cost_world import Conditions, World
from asyncrlhf.simulator.measure import QUIET, Measured, facts_of, measure
from asyncrlhf.simulator.plan import this_machine
from asyncrlhf.simulator.simulate import OVERRIDES

WORDS = ("batch_size=16", "num_generations=4", "generator.slots=16", "generator.max_completion_length=64")
COSTS = Fitted(
    (0.02, 0.001, 2e-5), (0.3, 4e-4), prefill_token=1e-4, score_terms={"reward": (0.01, 0.002)},
    snapshot=0.05, transfer=0.2, load=0.1, submit=0.004, collect=0.004,
)  # fmt: skip


def measured(costs: Fitted, conditions: Conditions | None = None) -> Measured:
    """Of parts that take exactly these seconds of the virtual clock."""
    config = load_config([*WORDS, *OVERRIDES, *QUIET])
    world = World(costs, Workload(8.0, 64.0, 0.0, 64), conditions or Conditions(), seed=0)
    runtime = CostRuntime(specs(config, config.weights), (), world)

    async def whole() -> Measured:
        try:
            return await measure(config, prepare(config), runtime, 120.0)
        finally:
            await runtime.close()

    return run_virtual(whole())


def test_the_costs_of_the_parts_are_found() -> None:
    found = measured(COSTS, Conditions(interference=(1.5, 2.0)))
    assert found.costs.decode_terms == pytest.approx(COSTS.decode_terms, rel=0.01)
    assert found.costs.train_terms == pytest.approx(COSTS.train_terms, rel=0.01)
    assert found.costs.score_terms["reward"] == pytest.approx((0.01, 0.002), rel=0.01)
    for name in ("prefill_token", "snapshot", "transfer", "load", "submit", "collect"):
        assert getattr(found.costs, name) == pytest.approx(getattr(COSTS, name), rel=0.02), name
    assert found.interference == pytest.approx((1.5, 2.0), rel=0.05)
    assert max(found.misfit.values()) < 0.01
    decode = found.tables["decode"]
    assert set(decode["running"]) == {1.0, 4.0, 8.0, 16.0} and min(decode["repeats"]) >= 5
    assert len(set(found.lengths)) == 1 and len(found.lengths) == 16


def replicas_enough(costs: Fitted) -> int:
    """The fewest replicas of four whose step is within 1% of the quickest, by the planner's closed forms."""
    work, layout = Workload(8.0, 64.0, 0.0, 64), Layout("auto", slots=16, batch_size=16, max_staleness=2)
    subject = Subject(ModelShape(1, 8, 8, 8, 1, 1, 8), work, 4, (this_machine(8),), layout, costs)
    steps = [estimate(replace(layout, replicas=n), subject).step for n in range(1, 5)]
    return next(n for n, step in enumerate(steps, 1) if step <= 1.01 * min(steps))


def test_a_slower_learner_is_measured_and_wants_fewer_replicas() -> None:
    quick, slow = (measured(Fitted((0.1, 0.0, 0.0), (f * 0.5, f * 1e-3))).costs for f in (1, 2))
    assert slow.train([500]) == pytest.approx(2 * quick.train([500]), rel=0.01)
    assert replicas_enough(slow) < replicas_enough(quick)


@pytest.mark.thorough
def test_the_plan_of_a_measured_profile_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths are the profile's own; a profile of another model is refused."""
    found, file = measured(Fitted((0.1, 0.0, 0.0), (0.5, 1e-3))), str(tmp_path / "profile.json")
    found.costs.save(tmp_path / "profile.json", facts_of(load_config([*WORDS, *OVERRIDES]), WORDS), **found.facts())
    kept = ["--keep", "slots=16", "--keep", "placement=auto", "learner.ranks=1", "generator.replicas=1"]
    kept += ["async.max_staleness=2", *WORDS]
    given = ["--profile", file, "--cores", "4", "--simulate", "2", "--out", str(tmp_path / "plans" / "mine")]
    assert main(["plan", *given, *kept, "runtime=local", "steps=2"]) == 0
    assert json.loads((tmp_path / "plans" / "mine.json").read_text())["weakest_source"] == "measured"
    quiet = ["logging.progress=none", "logging.report=false", "logging.wandb=disabled", f"run_dir={tmp_path}/run"]
    train(load_config([f"--config-dir={tmp_path}/plans", "experiment=mine", "generator.engine=fake", *quiet]))
    assert main(["plan", "--profile", file, "model.path=other/model"]) == 2
    assert "was measured with model.path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "--seconds 0 is too small"),
        (["generator.engine=fake"], "there is nothing to measure"),
        (["--from", "runs/x", "seed=1"], "takes no overrides"),
    ],
)
def test_nonsense_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
