"""What the report says of a multirun (``train -m``): a sweep's sentences, as far as its axes and launcher allow."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from asyncrlhf.report.html import build_report
from asyncrlhf.report.multirun import multirun_results
from asyncrlhf.sweeps.sentences import sentences

ONE_BY_ONE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SIDE_BY_SIDE = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SEEDS = 3


def make_job(folder: Path, *, seed: int, quality: float, staleness: float, seconds: float, **config: Any) -> None:
    folder.mkdir(parents=True)
    lines = [{"step": s, "staleness_mean": staleness, "wall_time": seconds * s / 4} for s in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"exit_reason": "done", "heldout_accuracy": {"after": quality}, "reward": {"last": quality}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, **config}))


def make_multirun(folder: Path, launcher: str, overrides: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hydra = {
        "sweep": {"subdir": "${hydra.job.num}"},
        "sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"},
        "launcher": {"_target_": launcher},
        "overrides": {"task": list(overrides)},
    }
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))


def sync_and_async(folder: Path, launcher: str, runtime: str = "ray") -> dict[str, np.ndarray]:
    """Three seeds of sync, and of async at bound 4; returns the raw figures [2, SEEDS] by name."""
    rng = np.random.default_rng(0)
    quality = np.array([[0.5, 0.6, 0.7], [0.45, 0.56, 0.62]])
    seconds = np.array([[30.0, 40.0, 50.0], [20.0, 22.0, 27.0]]) + rng.uniform(0, 1, (2, SEEDS))
    for number, mode in enumerate(("sync", "async")):
        for seed in range(SEEDS):
            make_job(
                folder / str(SEEDS * number + seed), seed=seed, quality=quality[number, seed], staleness=3.5 * number,
                seconds=seconds[number, seed], runtime=runtime, algorithm={"name": "tis"},
                **{"async": {"mode": mode, "max_staleness": 4}},
            )  # fmt: skip
    make_multirun(folder, launcher, ["steps=4", "async=sync,fill", "seed=0,1,2", f"runtime={runtime}"])
    return {"quality": quality, "seconds": seconds}


def test_jobs_one_after_the_other_end_in_quality_and_speed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "two" / "today"
    raw = sync_and_async(folder, ONE_BY_ONE)
    base, own = raw["quality"]
    kept = own.mean() / base.mean()
    left = ((own - kept * base) / base.mean()).std(ddof=1) / SEEDS**0.5
    speeds = raw["seconds"][0] / raw["seconds"][1]
    assert 1 - kept > 2 * left, "made for a loss beyond chance"
    results = multirun_results(folder)
    assert results is not None
    assert sentences(results)[0] == (
        f"async, max_staleness 4 (staleness 3.5) loses {100 * (1 - kept):.0f} ± {100 * left:.0f}% of the held-out "
        f"accuracy at {speeds.mean():.2f} ± {speeds.std(ddof=1) / SEEDS**0.5:.2f} times the speed of sync (quality: "
        "3 seeds; speed: async at that bound, 3 seeds, each alone on the machine)."
    )
    assert not any("alternated" in sentence for sentence in sentences(results)), "Hydra alternates nothing"
    page = html.unescape(build_report([folder]).read_text())
    assert all(sentence in page for sentence in sentences(results)) and "Quality against staleness" in page
    above = html.unescape(build_report([tmp_path / "runs"], tmp_path / "out").read_text())
    assert sentences(results)[0] in above


@pytest.mark.parametrize(("launcher", "runtime"), [(SIDE_BY_SIDE, "ray"), (ONE_BY_ONE, "local"), ("", "ray")])
def test_no_speed_is_claimed_for_jobs_side_by_side_or_on_a_virtual_clock(
    tmp_path: Path, launcher: str, runtime: str
) -> None:
    raw = sync_and_async(tmp_path / "today", launcher, runtime)
    results = multirun_results(tmp_path / "today")
    assert results is not None
    said = sentences(results)
    share = 100 * raw["quality"][1].mean() / raw["quality"][0].mean()
    assert f"the run keeps {share:.0f} ±" in said[0] and said[-1].startswith("No speed is reported")
    assert not any("alone on the machine)" in s or "times the speed" in s for s in said)


def test_any_choice_is_ranked_and_a_job_without_a_result_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "today"
    settings = {"mode": "async", "max_staleness": 2}
    for number in range(3):
        figures = {"quality": 0.2 + number / 10, "staleness": 1.0, "seconds": 9.0}
        make_job(folder / str(number), seed=number % 2, **figures, **{"async": settings})
    make_multirun(folder, SIDE_BY_SIDE, ["learner.learning_rate=1e-4,1e-3", "seed=0,1", "hydra/launcher=joblib"])
    results = multirun_results(folder)
    assert results is not None
    ranking, _, missing = sentences(results)
    assert "the best first: learning_rate 0.001 0.400, learning_rate 0.0001 0.250 ± 0.050" in ranking
    assert missing == "Without 1 of the jobs: 3 (learner.learning_rate=0.001, seed=1) (without a result)."


@pytest.mark.parametrize("overrides", [["name=a,b"], ["seed=0,1", "run_dir=out"], []])
def test_where_the_axes_compare_nothing_there_is_no_sentence(tmp_path: Path, overrides: list[str]) -> None:
    for number in (0, 1):
        make_job(tmp_path / str(number), seed=0, quality=0.5, staleness=1.0, seconds=9.0, **{"async": {"mode": "sync"}})
    make_multirun(tmp_path, ONE_BY_ONE, overrides)
    assert multirun_results(tmp_path) is None
