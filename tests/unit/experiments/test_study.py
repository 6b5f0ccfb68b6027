"""The studies of experiments/: equal work along the axis, resumption, the pilot's choice, the KL, one short run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.pretrained import load_model
from experiments.distance import sequence_kl
from experiments.study import KEY, RUN_COLUMNS, Cell, Study, append, curve, pending, run_cell
from experiments.study_plot import change, pilot_table, plot, table
from tests.numeric import assert_close

FOLDERS = sorted(path.parent for path in (Path(__file__).resolve().parents[3] / "experiments").glob("*/study.yaml"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def study(request: pytest.FixtureRequest) -> Study:
    return Study.read(request.param)


def test_every_value_gives_the_same_samples_and_updates(study: Study) -> None:
    method = next(iter(study.methods))
    configs = [load_config(study.cell(method, value, 1e-4, 0).overrides) for value in study.values]
    assert len({config.steps * config.batch_size for config in configs}) == 1
    assert len({config.steps * config.algorithm.minibatches for config in configs}) == 1


def test_every_method_makes_as_many_updates_a_step_as_the_study_says(study: Study) -> None:
    value = list(study.values)[-1]
    wanted = [o for o in [*study.base, *study.values[value]] if o.startswith("algorithm.minibatches=")]
    for method in study.methods:
        config = load_config(study.cell(method, value, 1e-4, 0).overrides)
        assert f"algorithm.minibatches={config.algorithm.minibatches}" == wanted[-1], method
        assert config.algorithm.num_iterations == 1


def small(tmp_path: Path, **changes: object) -> Study:
    plain = Study(
        folder=tmp_path,
        axis="N",
        values={1: ["steps=2"], 2: ["steps=1", "algorithm.minibatches=2"]},
        methods={"grpo": ["algorithm=grpo"], "rloo": ["algorithm=rloo"]},
        base=["runtime=local", "async=sync", "batch_size=16", "task.heldout_size=8", "logging=quiet"],
        seeds=[0, 1],
        samples=2,
        pilot_value=1,
        pilot_rates=[1e-5, 1e-4],
        pilot_seeds=[7],
    )
    return replace(plain, **changes)


def rows(cells: list[Cell], rewards: list[float]) -> list[dict[str, object]]:
    return [
        dict(zip(KEY, c.key, strict=True)) | {"reward": r, "kl": 1.0 + c.value, "status": "done"}
        for c, r in zip(cells, rewards, strict=True)
    ]


def test_the_pilot_decides_each_methods_learning_rate(tmp_path: Path) -> None:
    study = small(tmp_path)
    with pytest.raises(ConfigError, match="lacks grpo, rloo"):
        study.grid()
    cells = study.pilot()
    assert {cell.seed for cell in cells} == {7} and len(cells) == 4
    # A run that diverged has no reward, and is never the best.
    best = {("grpo", 1e-5): 0.5, ("grpo", 1e-4): float("nan"), ("rloo", 1e-5): 0.2, ("rloo", 1e-4): 0.3}
    append(tmp_path / "pilot.csv", rows(cells, [best[c.method, c.learning_rate] for c in cells]), RUN_COLUMNS)
    assert "| grpo | 0.500 | nan |" in pilot_table(pd.read_csv(tmp_path / "pilot.csv"), ["grpo", "rloo"])
    assert study.rates() == {"grpo": 1e-5, "rloo": 1e-4}
    assert len(study.grid()) == 8
    assert small(tmp_path / "none", learning_rate=3e-5).rates() == {"grpo": 3e-5, "rloo": 3e-5}


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    cells = small(tmp_path, learning_rate=2.5e-5).grid()
    path = tmp_path / "runs.csv"
    assert pending(cells, path) == cells
    append(path, rows(cells[:3], [0.1, 0.2, 0.3]), RUN_COLUMNS)
    append(path, rows(cells[3:4], [0.4]), RUN_COLUMNS)
    assert pending(cells, path) == cells[4:]


def test_a_curve_counts_updates() -> None:
    points = curve(pd.Series(np.arange(40.0)), updates_a_step=4)
    assert len(points) == 20
    assert points[0] == {"update": 8, "reward_mean": 0.5} and points[-1] == {"update": 160, "reward_mean": 38.5}
    assert [p["update"] for p in curve(pd.Series([1.0, 2.0]), 1)] == [1, 2]


def test_the_kl_of_a_response_is_the_sum_over_its_own_tokens() -> None:
    start, policy = load_model(ModelConfig()), load_model(ModelConfig())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    prompts = [np.array([1, 5, 14, 6, 17]), np.array([1, 5, 17])]
    responses = [np.array([7, 2]), np.array([6, 8, 9, 2])]
    found = sequence_kl(policy, start, prompts, responses).numpy()
    for prompt, response, kl in zip(prompts, responses, found, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            p, q = (torch.softmax(m(input_ids=ids).logits[0].double(), -1).numpy() for m in (policy, start))
        where = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        assert_close(kl, (p * np.log(p / q)).sum(-1)[where].sum(), rtol=1e-4)
    same = sequence_kl(start, start, prompts, responses)
    assert_close(same, torch.zeros_like(same), atol=1e-6)


def test_a_run_becomes_a_row_a_curve_and_a_figure(tmp_path: Path) -> None:
    study = small(tmp_path, learning_rate=1e-4)
    cell = study.grid()[2]
    row, points = run_cell(cell, study.samples)
    assert set(row) == set(RUN_COLUMNS) and row["status"] == "done"
    assert 0 <= row["reward"] <= 1 and row["kl"] > 0
    assert [point["update"] for point in points] == [2]
    cells = study.grid()
    append(tmp_path / "runs.csv", rows(cells, [0.1 * i for i in range(8)]), RUN_COLUMNS)
    plot(tmp_path, "N", list(study.methods), 0.2)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_tables_give_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    cells = small(tmp_path, learning_rate=1e-4).grid()  # by seed, value, method
    frame = pd.DataFrame(rows(cells, [0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.5, 0.4]), columns=RUN_COLUMNS)
    assert "| grpo | 0.0001 | 0.200 ± 0.141 | 0.400 ± 0.141 |" in table(frame, "reward", ["grpo", "rloo"])
    assert "| grpo | +0.200 | 0.141 |" in change(frame, ["grpo", "rloo"])
