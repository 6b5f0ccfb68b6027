"""Searches: what Optuna is told and asked, without a run: trials come to a made-up objective at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.results import best_trial
from asyncrlhf.sweeps.run import open_sweep
from asyncrlhf.sweeps.search import Search, split_space

pytest.importorskip("optuna", reason="the extra optuna is not installed")
SPACE = ["learner.learning_rate=tag(log,interval(1e-6,1e-2))", "algorithm=grpo,tis", "async.lag=range(0,9,2)"]


class World:
    """A search whose trials end at once: ``value`` of the trial's settings, or None for one that fails."""

    def __init__(
        self,
        folder: Path,
        value: Callable[[dict[str, str]], float | None],
        space: Sequence[str] = SPACE,
        **settings: Any,
    ) -> None:
        self.folder, self.value, self.ran = folder, value, 0
        self.records: dict[str, Any] = {}
        sweep = SweepConfig(search="optuna", **settings)
        self.search = Search(split_space(space)[1], sweep, 7, "", self.make)

    def make(self, number: int, overrides: Sequence[str]) -> list[Any]:
        values = dict(override.split("=") for override in overrides)
        if values.get("algorithm") == "refused":
            raise ConfigError("does not go together")
        text = ",".join(overrides)
        return [
            SimpleNamespace(hash=f"{text},seed={seed}", values=values, seed=seed)
            for seed in range(self.search.settings.seeds)
        ]

    def round(self, width: int = 2) -> bool:
        jobs = self.search.more(self.records, self.folder, width)
        for job in jobs:
            assert job.hash not in self.records, "it was run twice"
            self.ran += 1
            value = self.value(job.values)
            folder = f"job-{len(self.records)}"
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
            told = {"heldout_accuracy": {"after": None if value is None else value + 0.01 * (job.seed - 0.5)}}
            (self.folder / folder / "summary.json").write_text(json.dumps(told))
            self.records[job.hash] = SimpleNamespace(state="failed" if value is None else "done", folder=folder)
        return bool(jobs)

    @property
    def values(self) -> list[dict[str, str]]:
        return [trial.values for trial in self.search.trials]


def hill(values: dict[str, str]) -> float:
    """Best at a learning rate of 1e-4, tis and lag 2."""
    rate = math.log10(float(values["learner.learning_rate"]))
    return (
        1.0 - 0.1 * (rate + 4) ** 2 - 0.2 * (values["algorithm"] == "grpo") - 0.05 * abs(int(values["async.lag"]) - 2)
    )


def test_it_climbs_and_one_seed_gives_one_search(tmp_path: Path) -> None:
    worlds = [World(tmp_path / name, hill, trials=40, seeds=2) for name in "ab"]
    for world in worlds:
        while world.round():
            pass
    one, other = worlds
    assert one.values == other.values and len(one.values) == 40 and one.ran == 80
    late = [hill(values) for values in one.values[25:]]
    early = [hill(values) for values in one.values[:10]]
    assert sum(late) / len(late) > sum(early) / len(early) + 0.1 and max(late) > 0.9
    assert {int(values["async.lag"]) for values in one.values} <= {0, 2, 4, 6, 8}
    assert all(1e-6 <= float(values["learner.learning_rate"]) <= 1e-2 for values in one.values)


def test_a_search_goes_on_where_it_was_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    whole = World(tmp_path / "whole", hill, trials=14)
    while whole.round():
        pass
    first = World(tmp_path / "first", hill, trials=14)
    for _ in range(3):
        first.round()
    second = World(tmp_path / "first", hill, trials=14)
    second.search.restore(json.loads(json.dumps(first.search.plain()))["trials"])
    second.records = first.records
    while second.round():
        pass
    assert second.values == whole.values and second.ran == 14 - 6


def test_trials_that_fail_or_cannot_run_count_and_are_avoided(tmp_path: Path) -> None:
    space = ["learner.learning_rate=tag(log,interval(1e-6,1e-2))", "algorithm=tis,refused"]
    world = World(
        tmp_path, lambda v: 0.5 if float(v["learner.learning_rate"]) < 1e-4 else None, space, trials=30
    )  # fmt: skip
    while world.round():
        pass
    assert len(world.values) == 30 and world.ran < 30
    late = world.values[15:]
    assert sum(float(v["learner.learning_rate"]) < 1e-4 and v["algorithm"] == "tis" for v in late) > 0.7 * len(late)
    assert {trial.note for trial in world.search.trials} == {"", "does not go together"}


def test_what_was_suggested_before_is_not_run_again(tmp_path: Path) -> None:
    world = World(tmp_path, lambda values: 0.5, ["algorithm=grpo,tis"], trials=9)
    while world.round():
        pass
    assert len(world.values) == 9 and world.ran == 2


def test_the_plan_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*SPACE, "async=fixed_lag", "sweep.search=optuna"]
    plan = plan_sweep([*asked, "seeds=2"])
    assert plan.total == 40 and plan.search is not None and not plan.jobs
    assert plan.search.axes[0].plain() == "learner.learning_rate: 1e-06 to 0.01 (log)"
    jobs = plan.search.make(3, ["learner.learning_rate=2e-5", "algorithm=tis", "async.lag=4"])
    assert [job.seed for job in jobs] == [0, 1] and jobs[0].config.async_.lag == 4
    assert jobs[1].name == "trial-003,learning_rate=2e-05,algorithm=tis,lag=4,seed=1"
    names = {plan_sweep([*asked, "seeds=2", f"sweep.trials={n}"]).folder_name for n in (20, 50)}
    assert names == {plan.folder_name}, "more trials go on with the same search"
    assert plan_sweep(asked).folder_name != plan.folder_name
    for wrong, sentence in (
        (SPACE, "interval(...) has no end of values; give sweep.search=optuna"),
        ([*asked, "seed=0,1"], "chooses no seeds; give seeds=N"),
        (["experiment=staleness_quick", *asked], "give sweep.parts=null"),
        (["sweep.search=optuna"], "has nothing to choose from"),
        ([*asked, "sweep.objective=rewrd"], "sweep.objective=rewrd is not a metric"),
        (["learner.learning_rate=interval(1,0)", "sweep.search=optuna"], "needs its lower end first"),
    ):
        with pytest.raises(ConfigError) as refused:
            plan_sweep(wrong)
        assert sentence in str(refused.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package optuna, which is not installed: pip install 'asyncrlhf"):
        open_sweep(plan, Path("nowhere"), accept_changed=False)


def test_the_best_trial_is_named_with_its_error(tmp_path: Path) -> None:
    rows = []
    for part, values in (("trial-000", (0.5, 0.7)), ("trial-001", (0.8, 0.6)), ("trial-002", (0.9, None))):
        for seed, value in enumerate(values):
            folder = tmp_path / f"{part}-{seed}"
            folder.mkdir()
            (folder / "summary.json").write_text(json.dumps({"heldout_accuracy": {"after": value}}))
            rows.append(
                {"part": part, "state": "done", "folder": folder.name, "choices": {"algorithm": f"a{part[-1]}"}}
            )
    document = {"search": {"objective": "heldout_accuracy", "direction": "maximize"}, "jobs": rows}
    said = "Best of 2 trials: heldout_accuracy 0.700 ± 0.100 (2 seeds) with algorithm=a1 (trial-001)."
    assert best_trial(tmp_path, document).startswith(said)
    assert best_trial(tmp_path, {"jobs": rows}) == ""
