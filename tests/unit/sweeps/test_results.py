"""What a sweep's figures and sentences say, from made-up runs whose answers are known."""

from __future__ import annotations

import html
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.report.html import build_report
from asyncrlhf.report.load import load_runs
from asyncrlhf.report.page import Canvas, page_axes
from asyncrlhf.report.series import group_all
from asyncrlhf.report.sweep import sweep_section, sweep_tables
from asyncrlhf.sweeps.record import owned
from asyncrlhf.sweeps.results import Estimate, read_results
from asyncrlhf.sweeps.sentences import sentences, write_results


def make_job(
    folder: Path, name: str, choices: dict[str, str], seed: int, *, quality: float, staleness: float,
    seconds: float = 10.0, mode: str = "fixed_lag", timing: str = "shared", state: str = "done",
) -> dict[str, Any]:  # fmt: skip
    run = folder / "jobs" / name
    run.mkdir(parents=True)
    lines = [{"step": s, "staleness_mean": staleness, "wall_time": seconds * s / 4} for s in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"exit_reason": "done", "heldout_accuracy": {"after": quality}, "reward": {"last": quality}}
    (run / "summary.json").write_text(json.dumps(summary))
    config = {"async": {"mode": mode, "max_staleness": 4, "lag": int(choices.get("async.lag", 0))}}
    return {
        "name": name, "hash": name, "part": "", "timing": timing, "choices": choices, "seed": seed, "state": state,
        "folder": f"jobs/{name}", "config": config,
    }  # fmt: skip


def write(folder: Path, jobs: list[dict[str, Any]]) -> None:
    document = {"format": 1, "name": "made", "overrides": [], "git": None, "data": {}, "jobs": jobs}
    (folder / "sweep.json").write_text(json.dumps(document))


def quality_jobs(folder: Path) -> list[dict[str, Any]]:
    """Seeds differ by more than lags do, so that only pairs tell: base 0.4 and 0.6, lag 4 of grpo 0.1 below each."""
    jobs = []
    for seed, base in ((0, 0.4), (1, 0.6)):
        for name, loss in (("grpo", 0.1), ("decoupled_grpo", 0.02 * seed)):
            for lag in (0, 4):
                choices = {"async.lag": str(lag), "algorithm": name}
                quality = base - (loss if lag else 0.0)
                jobs.append(
                    make_job(folder, f"{name}-{lag}-{seed}", choices, seed, quality=quality, staleness=0.9 * lag)
                )
    return jobs


def test_learned_rewards_are_called_rewards(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)
    write(tmp_path, jobs)
    assert "of the held-out accuracy" in " ".join(sentences(read_results(tmp_path)))
    file = tmp_path / jobs[0]["folder"] / "summary.json"
    summary = json.loads(file.read_text())
    summary["heldout_accuracy"]["measure"] = "reward"
    file.write_text(json.dumps(summary))
    said = " ".join(sentences(read_results(tmp_path)))
    assert "of the held-out reward" in said and "accuracy" not in said


def test_what_is_kept_is_told_by_pairs_of_one_seed(tmp_path: Path) -> None:
    write(tmp_path, quality_jobs(tmp_path))
    results = read_results(tmp_path)
    kept = {(cell.method, cell.setting): cell.kept for cell in results.cells}
    assert kept["grpo", "lag 0"] is None
    grpo, other = kept["grpo", "lag 4"], kept["decoupled_grpo", "lag 4"]
    assert grpo is not None and other is not None
    # Of pairs that differ by the same amount the difference is certain, and the share is not: 75% and 83%.
    assert grpo.mean == pytest.approx(0.8) and grpo.error == pytest.approx(0.04) and grpo.count == 2
    assert other.mean == pytest.approx(0.98) and other.error == pytest.approx(0.016)
    (sentence, ranking, silence) = sentences(results)
    assert sentence.startswith(
        "lag 4 (staleness 3.6): decoupled_grpo keeps 98 ± 2%, grpo keeps 80 ± 4% of the held-out"
    )
    assert "The best is lag 0 with decoupled_grpo; its lead of 0.000 ± 0.000 over lag 0 with grpo" in ranking
    assert silence.startswith("No speed is reported")


def test_speed_is_that_of_jobs_that_had_the_machine_alone(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)  # these ran side by side, and some were quick
    for seed, (slow, quick) in enumerate([(30.0, 20.0), (60.0, 30.0)]):
        options: dict[str, Any] = {"timing": "exclusive", "quality": 0.5}
        sync, free = {"async": "sync"}, {"async": "async"}
        jobs.append(make_job(tmp_path, f"s{seed}", sync, seed, seconds=slow, staleness=0, mode="sync", **options))
        jobs.append(make_job(tmp_path, f"a{seed}", free, seed, seconds=quick, staleness=3, mode="async", **options))
    write(tmp_path, jobs)
    results = read_results(tmp_path)
    speeds = {cell.setting: cell.speedup for cell in results.cells if cell.speedup is not None}
    assert set(speeds) == {"async, max_staleness 4"}
    assert speeds["async, max_staleness 4"].mean == pytest.approx((1.5 + 2.0) / 2)
    assert "trains the same steps at 1.75 ± 0.25 times the speed of sync (2 alternated pairs" in sentences(results)[-1]
    groups, _ = group_all(load_runs(results.runs), [results])
    canvas = Canvas(page_axes(groups), faint=True)
    by_lag, by_time = sweep_section(results, groups, canvas)[0].charts
    labels = [groups[n].label for trace in by_lag.traces[""] if trace["kind"] == "marks" for n in trace["of"]]
    assert labels == ["decoupled_grpo, lag 0", "decoupled_grpo, lag 4", "grpo, lag 0", "grpo, lag 4"]
    fronts = [canvas.arrays.lists[trace["x"]] for trace in by_time.traces[""] if trace["kind"] == "front"]
    assert fronts == [[25.0]]
    (table,) = sweep_tables(results)
    assert {row[6] for row in table.rows if row[0] == "grpo"} == {"not alone"}


WINDOW = "{'policy': 'window', 'share': 0.5}"


def cache_jobs(folder: Path) -> list[dict[str, Any]]:
    """Seeds lie far apart. A window costs grpo 0.10 and 0.14, tis 0.02 and 0.04; lag 4 costs 0.05 and 0.07."""
    jobs = []
    for seed, base in ((0, 0.4), (1, 0.7)):
        for name, losses in (("grpo", (0.10, 0.14)), ("tis", (0.02, 0.04))):
            for cache, lag in itertools.product(("full", WINDOW), (0, 4)):
                lost = losses[seed] * (cache != "full") + (0.05, 0.07)[seed] * (lag > 0)
                choices = {"generator.cache": cache, "async.lag": str(lag), "algorithm": name}
                quality = base - lost + 0.01 * (name == "tis" and cache == "full")
                job = make_job(
                    folder, f"{name}-{cache[:9]}-{lag}-{seed}", choices, seed, quality=quality, staleness=0.9 * lag
                )
                job["config"]["algorithm"] = {"name": name, "correction": "none" if name == "grpo" else "truncate"}
                if cache != "full":
                    lines = folder / job["folder"] / "metrics.jsonl"
                    rows = [json.loads(line) for line in lines.read_text().splitlines()]
                    made = [json.dumps(row | {"cache_kept_fraction": 0.5 + 0.02 * seed}) for row in rows]
                    lines.write_text("".join(f"{line}\n" for line in made))
                jobs.append(job)
    return jobs


def test_what_a_smaller_cache_costs_is_told_beside_staleness_and_correction(tmp_path: Path) -> None:
    jobs = cache_jobs(tmp_path)
    write(tmp_path, jobs)
    results = read_results(tmp_path)
    (said,) = [sentence for sentence in sentences(results) if "smaller cache" in sentence]
    assert said == (
        "Of the held-out accuracy, a smaller cache costs 0.120 ± 0.020 with window, share 0.5 (51% kept) under grpo at "
        "lag 0, 0.120 ± 0.020 with window, share 0.5 (51% kept) under grpo at lag 4, 0.040 ± 0.010 with window, share "
        "0.5 (51% kept) under tis at lag 0, 0.040 ± 0.010 with window, share 0.5 (51% kept) under tis at lag 4; "
        "staleness costs 0.060 ± 0.010 at lag 4 under grpo with full, 0.060 ± 0.010 at lag 4 under tis with full, "
        "0.060 ± 0.010 at lag 4 under grpo with window, share 0.5, 0.060 ± 0.010 at lag 4 under tis with window, share "
        "0.5; a correction brings back 0.090 ± 0.010 by tis with window, share 0.5 at lag 0, 0.090 ± 0.010 by tis with "
        "window, share 0.5 at lag 4 (2 common seeds)."
    )
    assert said in html.unescape(build_report([tmp_path]).read_text())
    shares = [job for job in jobs if job["choices"]["algorithm"] == "tis" and job["choices"]["async.lag"] == "0"]
    for job in shares:
        whole = job["choices"]["generator.cache"] == "full"
        job["choices"] = {"generator.cache.share": "1.0" if whole else "0.5"}
    write(tmp_path, shares)
    (said,) = [sentence for sentence in sentences(read_results(tmp_path)) if "smaller cache" in sentence]
    assert said == (
        "Of the held-out accuracy, a smaller cache costs 0.040 ± 0.010 with share 0.5 (51% kept) at fixed_lag (2 "
        "common seeds)."
    )
    write(tmp_path / "other", quality_jobs(tmp_path / "other"))
    assert not any("cache" in sentence for sentence in sentences(read_results(tmp_path / "other")))


def share_of(folder: Path, method: str, lag: int) -> tuple[float, float]:
    """Quality kept at a lag and its standard error in percent, from the raw files, by the delta method in full: the
    variances of both means and their covariance."""
    found = {
        at: [
            json.loads((folder / "jobs" / f"{method}-{at}-{seed}" / "summary.json").read_text())["heldout_accuracy"][
                "after"
            ]
            for seed in (0, 1, 2)
        ]
        for at in (0, lag)
    }
    base, own = np.array(found[0]), np.array(found[lag])
    ratio = own.mean() / base.mean()
    (own_var, both), (_, base_var) = np.cov(own, base) / 3
    return 100 * ratio, 100 * np.sqrt(own_var - 2 * ratio * both + ratio**2 * base_var) / base.mean()


def test_one_sentence_joins_quality_at_a_lag_and_speed_at_that_bound(tmp_path: Path) -> None:
    jobs = []
    noise = (-0.02, 0.03, -0.01)
    bases, losses = (0.40, 0.55, 0.61), {("tis", 4): 0.01, ("tis", 16): 0.08, ("grpo", 4): 0.02, ("grpo", 16): 0.2}
    for seed, base in enumerate(bases):
        for method in ("tis", "grpo"):
            for lag in (0, 4, 16):
                quality = base - (losses[method, lag] + noise[seed] if lag else 0.0)
                choices = {"async.lag": str(lag), "algorithm": method}
                jobs.append(
                    make_job(tmp_path, f"{method}-{lag}-{seed}", choices, seed, quality=quality, staleness=0.9 * lag)
                )
    times = {"sync": (30.0, 34.0), "async": (20.0, 18.0)}
    for mode, seconds in times.items():
        for seed, taken in enumerate(seconds):
            options = {"mode": mode, "timing": "exclusive", "staleness": 3.0 * (mode == "async"), "seconds": taken}
            job = make_job(tmp_path, f"{mode}{seed}", {"async": mode}, seed, quality=0.1, **options)
            job["config"]["algorithm"] = {"name": "tis"}
            jobs.append(job)
    write(tmp_path, jobs)
    results = read_results(tmp_path)

    near, far, bare = share_of(tmp_path, "tis", 4), share_of(tmp_path, "tis", 16), share_of(tmp_path, "grpo", 16)
    ends = [
        json.loads((tmp_path / "jobs" / f"{m}{s}" / "metrics.jsonl").read_text().splitlines()[-1])["wall_time"]
        for m in times
        for s in (0, 1)
    ]
    speeds = np.array(ends[:2]) / np.array(ends[2:])
    said = (
        f"lag 4 (staleness 3.6) with tis keeps {near[0]:.0f} ± {near[1]:.0f}% of the held-out accuracy "
        f"at {speeds.mean():.2f} ± {speeds.std(ddof=1) / 2**0.5:.2f} times the speed of sync; "
        f"at lag 16 (staleness 14.4) it loses {100 - far[0]:.0f} ± {far[1]:.0f}%, "
        f"where grpo loses {100 - bare[0]:.0f} ± {bare[1]:.0f}% "
        "(quality: 3 seeds; speed: async at that bound, 2 alternated pairs, each alone on the machine)."
    )
    assert sentences(results)[0] == said
    assert not any("trains the same steps" in sentence for sentence in sentences(results)), "the speed is told once"
    assert said in html.unescape(build_report([tmp_path]).read_text())

    write_results(results, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    rows = {(row["method"], row["setting"], row["alone"]): row for row in written["configurations"]}
    lag, free = rows["tis", "lag 4", False], rows["tis", "async, max_staleness 4", True]
    assert written["sentences"][0] == said and rows["tis", "lag 0", False]["kept"] is None
    assert (100 * lag["kept"], 100 * lag["kept_error"]) == pytest.approx(near)
    assert free["speedup"] == pytest.approx(speeds.mean()) and free["runs"] == ["jobs/async0", "jobs/async1"]
    assert lag["runs"] == [f"jobs/tis-4-{seed}" for seed in (0, 1, 2)]


def test_quality_and_speed_of_different_bounds_or_methods_are_not_joined(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)
    for mode, bound, method in (("sync", 4, "grpo"), ("async", 2, "grpo"), ("sync", 4, "tis"), ("async", 4, "tis")):
        facts = {"async": mode, "async.max_staleness": str(bound)}
        job = make_job(
            tmp_path, f"{method}-{mode}", facts, 0, quality=0.5, staleness=3.0 * (mode == "async"), mode=mode,
            timing="exclusive",
        )  # fmt: skip
        job["config"] |= {"algorithm": {"name": method}, "async": {"mode": mode, "max_staleness": bound}}
        jobs.append(job)
    write(tmp_path, jobs)
    said = sentences(read_results(tmp_path))
    told = [sentence.partition(" trains the same steps")[0] for sentence in said if "times the speed" in sentence]
    assert told == ["async, max_staleness 2 (grpo)", "async, max_staleness 4 (tis)"]

    # Without jobs for quality alone the timed ones tell both, at the staleness that they came to.
    write(tmp_path, jobs[8:])
    said = sentences(read_results(tmp_path))
    assert said[0].startswith(
        "async, max_staleness 2 (staleness 3.0) keeps 100% of the held-out accuracy at 1.00 times"
    )
    assert not any("trains the same steps" in sentence for sentence in said)


def test_jobs_without_a_result_are_named_and_left_out(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)
    jobs[0]["state"] = "failed"
    (tmp_path / jobs[1]["folder"] / "metrics.jsonl").write_text("")
    write(tmp_path, jobs)
    results = read_results(tmp_path)
    assert set(results.left_out) == {"grpo-0-0", "grpo-4-0"} and len(results.cells) == 4
    assert "Without 2 of the jobs: grpo-0-0 (failed), grpo-4-0 (unreadable" in sentences(results)[-1]


def test_a_report_draws_finished_jobs_and_no_attempt_that_failed(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)
    make_job(tmp_path, "grpo-0-0.attempt-2", {}, 0, quality=0.0, staleness=9.0)
    write(tmp_path, jobs)
    page = build_report([tmp_path]).read_text()
    assert "8 runs, drawn" in page and "attempt-2" not in page


def test_one_seed_has_no_error_and_says_none(tmp_path: Path) -> None:
    assert Estimate.of([0.5]).text() == "0.500" and math.isnan(Estimate.of([0.5]).error)
    write(tmp_path, [job for job in quality_jobs(tmp_path) if job["seed"] == 0])
    assert "grpo keeps 75% of" in sentences(read_results(tmp_path))[0]


def test_an_algorithm_that_no_job_chose_is_named_beside_those_that_were_chosen(tmp_path: Path) -> None:
    job = make_job(tmp_path, "free", {"async": "async"}, 0, quality=0.5, staleness=3, mode="async", timing="exclusive")
    job["config"]["algorithm"] = {"name": "decoupled_grpo"}
    write(tmp_path, [*quality_jobs(tmp_path), job])
    assert read_results(tmp_path).methods == ["decoupled_grpo", "grpo"]
    write(tmp_path, [job])
    assert read_results(tmp_path).methods == ["the run"]


def test_no_speed_is_claimed_from_a_virtual_clock(tmp_path: Path) -> None:
    jobs = [
        make_job(tmp_path, f"{mode}{seed}", {"async": mode}, seed, quality=0.1, staleness=0, mode=mode, seconds=seconds,
                 timing="exclusive")
        for mode, seconds in (("sync", 30.0), ("async", 20.0)) for seed in (0, 1)
    ]  # fmt: skip
    write(tmp_path, jobs)
    assert "1.50" in " ".join(sentences(read_results(tmp_path)))
    for job in jobs:
        job["config"]["runtime"] = "local"
    write(tmp_path, jobs)
    said = sentences(read_results(tmp_path))
    assert "No speed is reported: no two jobs ran on Ray and alone on the machine (sweep.timing=exclusive)." in said
    assert "1.50" not in " ".join(said)


def lead_of(values: dict[str, list[float]], best: str, second: str) -> str:
    """The mean difference of the seeds' pairs and its standard error, in NumPy."""
    apart = np.array(values[best]) - np.array(values[second])
    return f"{apart.mean():.3f} ± {apart.std(ddof=1) / len(apart) ** 0.5:.3f}"


@pytest.mark.parametrize(
    ("key", "values", "names", "clear"),
    [
        # a plain setting; its seeds differ by more than its values do
        ("learner.learning_rate", {"1e-5": [0.30, 0.50], "1e-4": [0.41, 0.60]}, ("1e-5", "1e-4"), True),
        # a lag axis without its baseline
        ("async.lag", {"4": [0.50, 0.52], "16": [0.51, 0.50]}, ("16", "4"), False),
        ("buffer.max_reuse", {"1": [0.6, 0.7], "2": [0.5, 0.6], "4": [0.4, 0.4]}, ("2", "1"), True),
    ],
)
def test_every_axis_ends_in_a_sentence_with_the_best_and_its_lead(
    tmp_path: Path, key: str, values: dict[str, list[float]], names: tuple[str, str], clear: bool
) -> None:
    jobs = [
        make_job(tmp_path, f"{value}-{seed}", {key: value}, seed, quality=quality, staleness=4.0)
        for value, of in values.items() for seed, quality in enumerate(of)
    ]  # fmt: skip
    write(tmp_path, jobs)
    ranking, silence = sentences(read_results(tmp_path))
    second, best = names
    short = key.rpartition(".")[2]
    means = {value: np.array(of) for value, of in values.items()}
    first = means[best].mean(), means[best].std(ddof=1) / 2**0.5
    assert ranking.startswith(
        f"Held-out accuracy, the best first: {short} {best} {first[0]:.3f} ± {first[1]:.3f}, {short} {second} "
    )
    lead = lead_of(values, best, second)
    assert (f"it leads {short} {second} by {lead} (2 common seeds), more than two" in ranking) == clear
    assert (f"its lead of {lead} over {short} {second} (2 common seeds) may be chance" in ranking) != clear
    assert silence.startswith("No speed is reported: no two jobs")


def test_times_of_jobs_alone_are_compared_without_sync(tmp_path: Path) -> None:
    seconds = {"1": [20.0, 30.0], "2": [12.0, 15.0]}
    jobs = [
        make_job(tmp_path, f"{value}-{seed}", {"generator.replicas": value}, seed, quality=0.5, staleness=3.0,
                 seconds=taken, mode="async", timing="exclusive")
        for value, of in seconds.items() for seed, taken in enumerate(of)
    ]  # fmt: skip
    write(tmp_path, jobs)
    share = np.array(seconds["2"]) / np.array(seconds["1"])
    error = share.std(ddof=1) / 2**0.5
    said = " ".join(sentences(read_results(tmp_path)))
    assert "Training time, the fastest first: replicas 2 13.5 ± 1.5 s, replicas 1 25.0 ± 5.0 s." in said
    assert f"replicas 2 needs {100 * share.mean():.0f} ± {100 * error:.0f}% of the time of replicas 1 (2 alter" in said
    for job in jobs:
        job["timing"] = "shared"
    write(tmp_path, jobs)
    said = " ".join(sentences(read_results(tmp_path)))
    assert "Training time" not in said and "No speed is reported" in said


def test_one_seed_or_no_common_seed_claims_no_difference(tmp_path: Path) -> None:
    jobs = [
        make_job(tmp_path, f"a{seed}-{beta}", {"algorithm.beta": beta}, seed, quality=quality, staleness=2.0)
        for seed, beta, quality in ((0, "0.1", 0.5), (1, "0.2", 0.6))
    ]
    write(tmp_path, jobs)
    assert "has no standard error (0 common seeds), so that it may be chance" in sentences(read_results(tmp_path))[0]
    write(tmp_path, jobs[:1])
    assert sentences(read_results(tmp_path))[0] == "fixed_lag: held-out accuracy 0.500 (1 seed)."


def test_several_sweeps_below_a_folder_keep_their_sentences(tmp_path: Path) -> None:
    for name, lost in (("one", 0.1), ("two", 0.2)):
        folder = tmp_path / "sweeps" / name
        write(folder, [
            make_job(folder, f"{lag}", {"async.lag": str(lag)}, 0, quality=0.5 - lost * bool(lag), staleness=0.9 * lag)
            for lag in (0, 4)
        ])  # fmt: skip
        make_job(folder, "4.attempt-0", {}, 0, quality=0.0, staleness=9.0)
    (tmp_path / "sweeps" / "broken").mkdir()
    (tmp_path / "sweeps" / "broken" / "sweep.json").write_text("{")
    page = html.unescape(build_report([tmp_path], tmp_path / "out").read_text())
    assert "one: lag 4 (staleness 3.6): the run keeps 80% of" in page
    assert "two: lag 4 (staleness 3.6): the run keeps 60% of" in page
    assert "4 runs, drawn" in page and "sweep.json cannot be read" in page


def test_jobs_that_a_killed_command_left_running_are_interrupted(tmp_path: Path) -> None:
    jobs = quality_jobs(tmp_path)
    for job in jobs[:2]:
        job["state"] = "running"
    (tmp_path / jobs[0]["folder"] / "summary.json").unlink()  # the other one ended before the record said so
    write(tmp_path, jobs)
    with owned(tmp_path):
        assert read_results(tmp_path).left_out == dict.fromkeys((job["name"] for job in jobs[:2]), "running")
    assert read_results(tmp_path).left_out == {jobs[0]["name"]: "interrupted"}
