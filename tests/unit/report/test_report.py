"""The report: what it draws agrees with an independent computation, and every kind of run directory is met."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from asyncrlhf.errors import ConfigError
from asyncrlhf.report.curves import curve, running_mean, smoothing_window, time_scale
from asyncrlhf.report.html import build_report, render
from asyncrlhf.report.load import Group, config_differences, group_runs, load_run, load_runs
from asyncrlhf.report.page import Canvas, curve_sections, lag_buckets, lag_values, page_axes
from asyncrlhf.report.panels import shown_panels, staleness_bound
from asyncrlhf.report.series import group_all, look
from asyncrlhf.report.sweep import reached
from asyncrlhf.report.table import build_tables
from asyncrlhf.sweeps.results import read_results
from tests.numeric import assert_close
from tests.unit.report.made import LAGS, full_run, full_sweep

LEDGER = {"admitted": 40, "trained": 36, "uses": 36, "dropped": {"stale": 3}, "failed": {}, "left": 1, "adds_up": True}


def make_run(
    folder: Path, *, seed: int = 0, eta: int = 2, steps: int = 12, summary: bool = True, **config: Any
) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(100 * eta + seed)
    times = np.cumsum(rng.uniform(0.5, 1.5, steps))
    lines = [
        {
            "step": s + 1,
            "wall_time": times[s],
            "reward_mean": rng.uniform(),
            "staleness_mean": rng.uniform(0, eta),
            "staleness_max": eta,
            "learner_idle_fraction": 0.25,
            "ess_fraction": None if s == 0 else 0.9,
            "heldout_accuracy": 0.5 if s % 5 == 4 else None,
            "samples_per_second": 10.0,
        }
        for s in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"seed": seed, "run_dir": str(folder), "async": {"max_staleness": eta}, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if summary:
        content = {
            "exit_reason": "done",
            "heldout_accuracy": {"before": 0.25, "after": 0.75},
            "staleness": {"bound": eta},
            "ledger": LEDGER,
        }
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


class Outside(HTMLParser):
    """Collects everything in a page that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tables += tag == "table"
        self.found += [value or "" for key, value in attrs if key in ("src", "href") and tag != "a"]


def test_seeds_become_their_mean_and_one_standard_deviation(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"s{seed}", seed=seed, steps=12 - seed) for seed in range(3)]
    [group] = group_runs(load_runs(paths))
    drawn = curve(group, "reward_mean", "step")
    frames = pd.concat(pd.read_json(p / "metrics.jsonl", lines=True) for p in paths)
    expected = frames.groupby("step")["reward_mean"].agg(["mean", "std", "count"])
    expected = expected[expected["count"] == 3]  # the steps that every seed reached
    assert drawn is not None and drawn.low is not None and drawn.high is not None
    np.testing.assert_array_equal(drawn.x, expected.index)
    assert_close(drawn.y, expected["mean"])
    assert_close(drawn.high - drawn.y, expected["std"])
    assert_close(drawn.y - drawn.low, expected["std"])


def test_over_wall_clock_seeds_are_compared_at_equal_times(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    [group] = group_runs(load_runs(paths))
    drawn = curve(group, "reward_mean", "wall_time", scale=60.0)
    frames = [pd.read_json(p / "metrics.jsonl", lines=True) for p in paths]
    assert drawn is not None
    assert_close(60 * drawn.x[0], max(f["wall_time"].iloc[0] for f in frames))
    assert_close(60 * drawn.x[-1], min(f["wall_time"].iloc[-1] for f in frames))
    for i in (0, 77, len(drawn.x) - 1):
        at = 60 * drawn.x[i]
        values = [_between(f["wall_time"].to_numpy(), f["reward_mean"].to_numpy(), at) for f in frames]
        assert_close(drawn.y[i], np.mean(values))


def _between(times: np.ndarray, values: np.ndarray, at: float) -> float:
    right = min(max(int(np.searchsorted(times, at)), 1), len(times) - 1)
    left = right - 1
    share = (at - times[left]) / (times[right] - times[left])
    return float(values[left] * (1 - share) + values[right] * share)


def test_running_mean_against_a_loop() -> None:
    values = np.random.default_rng(0).normal(size=50)
    slow = [values[max(0, i - 2) : i + 3].mean() for i in range(50)]
    assert_close(running_mean(values, 5), slow)
    np.testing.assert_array_equal(running_mean(values, 1), values)
    assert smoothing_window(39) == 1 and smoothing_window(300) % 2 == 1


def test_the_evaluations_before_and_after_are_points_of_the_curve(tmp_path: Path) -> None:
    [group] = group_runs([load_run(make_run(tmp_path / "run", steps=12))])
    drawn = curve(group, "heldout_accuracy", "step")
    assert drawn is not None
    assert list(zip(drawn.x, drawn.y, strict=True)) == [(0, 0.25), (5, 0.5), (10, 0.5), (12, 0.75)]
    reward = curve(group, "reward_mean", "step")
    assert reward is not None and reward.x[0] == 1 and len(reward.x) == 12


def test_groups_differ_by_what_their_label_says(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"e{eta}s{seed}", seed=seed, eta=eta) for eta in (1, 4) for seed in (0, 1)]
    paths.append(make_run(tmp_path / "other", seed=5, eta=4, steps=3, learner={"learning_rate": 1e-4}))
    groups = group_runs(load_runs([*paths, paths[0]]))
    assert [len(group.runs) for group in groups] == [2, 2, 1]
    assert "max_staleness=1" in groups[0].label and "learning_rate=0.0001" in groups[2].label
    assert len({group.label for group in groups}) == 3
    differing = config_differences(load_runs(paths))
    assert differing["async.max_staleness"] == [1, 1, 4, 4, 4]
    assert set(differing) == {"async.max_staleness", "learner.learning_rate"}
    assert staleness_bound(groups[1:]) == 4 and staleness_bound(groups) is None


def test_one_run_lands_in_its_own_folder_and_opens_without_a_network(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    page = build_report([run])
    assert page == run / "report" / "index.html"
    assert [p.name for p in page.parent.iterdir()] == ["index.html"]
    text = page.read_text()
    outside = Outside()
    outside.feed(text)
    assert outside.found == [] and "@import" not in text.split("</style>")[0]
    assert outside.tables == 2  # results and ledger; one run differs from nobody
    assert text.count("plotly.js v") == 1 and "36" in text and "3 (stale 3)" in text


def test_several_runs_make_one_page_with_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [make_run(tmp_path / f"e{eta}s{seed}", seed=seed, eta=eta) for eta in (1, 4) for seed in (0, 1)]
    page = build_report(paths)
    assert page == Path("report/index.html") and page.exists()
    runs = load_runs(paths)
    tables = {table.title.split(":")[0]: table for table in build_tables(runs, group_runs(runs))}
    assert set(tables) == {
        "Mean over seeds ± one standard deviation",
        "Results",
        "Rollouts",
        "Settings that differ",
    }
    rewards = [np.mean([run.rows[-1]["reward_mean"]]) for run in runs[:2]]  # a tenth of 12 steps is one
    expected = f"{np.mean(rewards):.3f} ± {np.std(rewards, ddof=1):.3f}"
    assert tables["Mean over seeds ± one standard deviation"].rows[0][2] == expected
    assert tables["Settings that differ"].rows == [["async.max_staleness", "1", "4"]]
    assert tables["Results"].rows[0][0] == runs[0].label


def test_interrupted_runs_and_single_lines_work(tmp_path: Path) -> None:
    killed = make_run(tmp_path / "killed", summary=False, steps=7)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    short = make_run(tmp_path / "short", summary=False, steps=1, eta=3)
    bare = make_run(tmp_path / "bare", summary=False, steps=2)
    (bare / "config.yaml").unlink()
    page = build_report([killed, short, bare], tmp_path / "out")
    text = page.read_text()
    assert "no summary (running or killed)" in text
    assert build_report([short]).exists()
    rows = load_run(killed).rows
    assert rows[-1]["step"] == 7


def test_text_from_a_config_cannot_break_the_page(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    paths = [make_run(tmp_path / "a", task={"path": bad}), make_run(tmp_path / "b", task={"path": "plain"})]
    runs = load_runs(paths)
    assert bad not in render(runs)


def test_wrong_folders_are_one_sentence(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    unstarted = tmp_path / "unstarted"
    unstarted.mkdir()
    (unstarted / "metrics.jsonl").write_text("")
    broken = make_run(tmp_path / "broken")
    (broken / "summary.json").write_text("{")
    for path, words in [
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path / "empty", "is not a run directory, and holds none"),
        (unstarted, "no complete learner step"),
        (broken, "cannot be parsed"),
    ]:
        with pytest.raises(ConfigError, match=words):
            build_report([path])
    with pytest.raises(ConfigError, match="no run"):
        build_report([])
    for file, words in (("preferences.jsonl", "preference data"), ("evaluation.json", "an evaluation")):
        (tmp_path / file.partition(".")[0]).mkdir()
        (tmp_path / file.partition(".")[0] / file).write_text("{}")
        with pytest.raises(ConfigError, match=rf"holds {words} and no curves; give a run of train, sft or reward-mod"):
            build_report([tmp_path / file.partition(".")[0]])


def test_folders_are_searched_and_what_cannot_be_read_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "many" / "one")
    make_run(tmp_path / "runs" / "two", seed=1)
    broken = make_run(tmp_path / "runs" / "broken")
    (broken / "summary.json").write_text("{")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "metrics.jsonl").write_text("")
    page = build_report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "2 runs, drawn" in page
    assert "cannot be parsed" in page and "no complete learner step" in page


def test_a_named_preset_stands_for_its_settings(tmp_path: Path) -> None:
    presets = [{"name": "grpo", "anchor": "prox", "epsilon": 0.2}, {"name": "ppo", "anchor": "mu", "epsilon": 0.1}]
    runs = [make_run(tmp_path / p["name"], algorithm=p, **{"async": {"lag": n}}) for n, p in enumerate(presets)]  # type: ignore[arg-type]
    assert [group.label for group in group_runs(load_runs(runs))] == ["grpo, lag=0", "ppo, lag=1"]


def test_only_panels_with_data_are_drawn_and_time_has_a_fitting_unit(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run"))
    titles = [panel.title for panel in shown_panels(group_runs([run]))]
    assert "Reward" in titles and "Entropy" not in titles and "Staleness that arose in flight" not in titles
    assert time_scale([run]) == (1.0, "seconds")
    run.columns["wall_time"][-1] = 4000.0
    assert time_scale([run]) == (60.0, "minutes")


def test_learned_rewards_are_called_rewards_and_drawn_whole(tmp_path: Path) -> None:
    rule = load_run(make_run(tmp_path / "rule", reward={"kind": "task"}, task={"kind": "arithmetic"}))
    learned = load_run(make_run(tmp_path / "learned", reward={"kind": "model"}, task={"kind": "prompts"}))
    fined = load_run(make_run(tmp_path / "fined", reward={"kind": "task", "missing_eos_penalty": 0.5}))
    drawn = {
        name: next(p for p in shown_panels(group_runs(runs)) if p.metrics[0] == "heldout_accuracy")
        for name, runs in {"rule": [rule], "learned": [learned], "fined": [fined], "both": [rule, learned]}.items()
    }
    assert drawn["rule"].title == "Held-out accuracy" and drawn["rule"].limits == (0.0, 1.0)
    for name in ("learned", "fined", "both"):
        assert drawn[name].title == "Held-out reward" and drawn[name].limits is None, name


def make_stage(folder: Path, stage: str, *, seed: int = 0, summary: bool = True) -> Path:
    """As TRL's trainers log: a line of training each second step, and evaluations on lines of their own."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    extra = {"sft": ["mean_token_accuracy"], "reward-model": ["accuracy", "margin", "min_reward"]}[stage]
    lines = []
    for step in range(0, 13, 2):
        if step:
            lines.append({"step": step, "wall_time": step * 1.0, **{name: rng.uniform() for name in ("loss", *extra)}})
        if step % 6 == 0:
            held = {f"heldout_{name}": rng.uniform() for name in ("loss", *extra)}
            lines.append({"step": step, "wall_time": step + 0.5, **held})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "sft": {"learning_rate": 1e-3}}))
    if summary:
        (folder / "summary.json").write_text(json.dumps({"stage": stage, "exit_reason": "done"}))
    return folder


@pytest.mark.parametrize("summary", [True, False], ids=["done", "under way"])
@pytest.mark.parametrize(
    ("stage", "titles"),
    [("sft", ["Loss", "Token accuracy"]), ("reward-model", ["Loss", "Accuracy", "Margin", "Scores"])],
)
def test_a_stage_has_its_own_curves_and_figures(tmp_path: Path, stage: str, titles: list[str], summary: bool) -> None:
    run = load_run(make_stage(tmp_path / "one", stage, summary=summary))
    [group] = group_runs([run])
    assert run.stage == stage and [panel.title for panel in shown_panels([group])] == titles
    frame = pd.read_json(run.path / "metrics.jsonl", lines=True)
    for panel in shown_panels([group]):
        for metric in panel.metrics:
            if metric not in frame:
                continue
            drawn = curve(group, metric, "step")
            known = frame[frame[metric].notna()]
            assert drawn is not None
            np.testing.assert_array_equal(drawn.x, known.step)
            assert_close(drawn.y, known[metric])
    [results] = build_tables([run], [group])
    cells = dict(zip(results.header, results.rows[0], strict=True))
    held = frame.heldout_loss.dropna()
    assert cells["held-out loss"] == f"{held.iloc[0]:.3f} → {held.iloc[-1]:.3f}"
    assert ("held-out accuracy" in cells) == (stage == "reward-model") and cells["steps"] == "12"
    if summary:
        return
    page = build_report([run.path]).read_text()
    assert "optimizer steps" in page and "learner steps" not in page and "Held-out accuracy" not in page


def test_seeds_of_a_stage_are_put_together(tmp_path: Path) -> None:
    runs = load_runs([make_stage(tmp_path / f"s{seed}", "sft", seed=seed) for seed in range(3)])
    groups = group_runs(runs)
    assert len(groups) == 1
    seeds, results = build_tables(runs, groups)
    lasts = [pd.read_json(run.path / "metrics.jsonl", lines=True).heldout_loss.dropna().iloc[-1] for run in runs]
    cells = dict(zip(seeds.header, seeds.rows[0], strict=True))
    assert cells["held-out loss, last"] == f"{np.mean(lasts):.3f} ± {np.std(lasts, ddof=1):.3f}"
    assert len(results.rows) == 3


def test_runs_of_several_stages_stand_side_by_side_each_with_its_curves(tmp_path: Path) -> None:
    sft, model = (make_stage(tmp_path / stage, stage) for stage in ("sft", "reward-model"))
    train = make_run(tmp_path / "train")
    page = build_report([sft, model, train], tmp_path / "out").read_text()
    for words in ("sft: Curves of sft", "Token accuracy", "Margin", "train: Quality", "3 configurations compared"):
        assert words in page, words


BROKEN = {
    "binary": {"metrics.jsonl": b"\x80\x81\xff"},
    "step in words": {"metrics.jsonl": b'{"step": "one"}\n'},
    "a list": {"metrics.jsonl": b"[1, 2]\n{}\n"},
    "torn config": {"config.yaml": b"seed: [0"},
    "listed config": {"config.yaml": b"- seed"},
    "binary summary": {"summary.json": b"\xff\xfe"},
    "ledger in words": {"summary.json": b'{"ledger": "lost"}'},
    "held out in words": {"summary.json": b'{"heldout_accuracy": "good"}'},
}


def test_a_broken_run_is_named_and_stops_no_report(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    for seed, (fault, files) in enumerate(BROKEN.items(), start=1):
        broken = make_run(tmp_path / "runs" / fault, seed=seed)
        for name, content in files.items():
            (broken / name).write_bytes(content)
    page = build_report([tmp_path / "runs"], tmp_path / "out").read_text()
    listed = page[page.index('<ul class="unread">') :].split("</ul>")[0]
    assert "1 run, drawn" in page
    assert [fault for fault in BROKEN if str(tmp_path / "runs" / fault) not in listed] == []


def test_jobs_of_a_multirun_that_left_nothing_are_named_by_their_choices(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "two" / "today"
    for job in (0, 2, 3):
        make_run(folder / str(job), seed=job // 2, eta=1 + job % 2)
    hydra = {
        "sweep": {"subdir": "${hydra.job.num}"},
        "sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"},
        "overrides": {"task": ["steps=12", "seed=0,1", "async.max_staleness=1,2"]},
    }
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    page = build_report([folder])
    assert page == folder / "report" / "index.html"
    text = page.read_text()
    assert "3 runs, drawn" in text and "max_staleness=1 (2 runs)" in text
    assert f"{folder}/1 left no run (seed=0 async.max_staleness=2)." in text
    assert text.count("left no run") == 1
    (folder / "multirun.yaml").write_text("hydra: [")
    assert "left no run" not in build_report([tmp_path / "runs"], tmp_path / "out").read_text()


def test_by_lag_a_step_weighs_as_its_tokens_in_the_bucket_do(tmp_path: Path) -> None:
    path = full_run(tmp_path / "run")
    run = load_run(path)
    assert lag_buckets([run]) == list(LAGS)
    frame = pd.read_json(path / "metrics.jsonl", lines=True)
    for lag in LAGS:
        tokens = (frame[f"lag_{lag}/token_fraction"] * frame.response_tokens).fillna(0)
        expected = (frame[f"lag_{lag}/kl"] * tokens).sum() / tokens.sum()
        assert_close(lag_values([run], "kl", lag), [expected])
        assert_close(lag_values([run], "token_fraction", lag), [tokens.sum() / frame.response_tokens.sum()])


def test_the_time_to_a_quality_is_that_of_the_raw_rewards(tmp_path: Path) -> None:
    folder = full_sweep(tmp_path / "sweep")
    for line in folder.glob("jobs/*/metrics.jsonl"):
        rows = [{**json.loads(row), "heldout_accuracy": None} for row in line.read_text().splitlines()]
        line.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = read_results(folder)
    groups, _ = group_all(load_runs(results.runs), [results])
    axes = page_axes(groups)
    found = reached(results.cells, groups, axes)
    assert found is not None and "reward" in found.what
    frames = [[pd.read_json(p.path / "metrics.jsonl", lines=True) for p in cell.points] for cell in results.cells]
    means = [[f.reward_mean.rolling(4).mean() for f in cell] for cell in frames]  # a tenth of 45 steps
    goal = 0.9 * max(np.mean([m.iloc[-1] for m in cell]) for cell in means)
    assert_close(found.goal, goal)
    for number, (cell, seeds, ways) in enumerate(zip(results.cells, frames, means, strict=True)):
        samples = [f.sequences.cumsum()[m >= goal].min() for f, m in zip(seeds, ways, strict=True)]
        came = [s for s in samples if s == s]
        assert found.came[number] == (number, len(came))
        if len(came) == len(seeds):
            assert_close(found.goals[number, "samples_trained"].mean, np.mean(came))
        assert ((number, "wall_time") in found.goals) == (cell.exclusive and len(came) == len(seeds))


def test_no_two_series_look_alike() -> None:
    alone = [look(number) for number in range(192)]
    assert len(set(alone)) == 192 and len({color for color, _, _ in alone[:8]}) == 8
    assert {dash for _, dash, _ in alone[:8]} == {"solid"}
    sweep = [look(method, setting, 6) for method in range(12) for setting in range(6)]
    assert len(set(sweep)) == len(sweep)


def test_twenty_long_runs_stay_under_15_mb(tmp_path: Path) -> None:
    """Told from four: what the first four add, each further one adds. Rollouts may take 4 MB, in another section."""
    paths = [full_run(tmp_path / f"r{n}", steps=500, gain=n / 8, learner={"learning_rate": n}) for n in range(4)]
    sizes = [build_report(some, tmp_path / "out").stat().st_size for some in (paths[:1], paths)]
    assert sizes[1] + 16 * (sizes[1] - sizes[0]) / 3 < 11e6


def test_what_changes_by_layer_is_drawn_in_the_models_order(tmp_path: Path) -> None:
    path = full_run(tmp_path / "run")
    groups = [Group("run", (load_run(path),))]
    axis = Canvas(page_axes(groups), faint=False)
    (section,) = [s for s in curve_sections(groups, [0], axis) if s.heading == "Weights"]
    (chart,) = section.charts
    assert list(chart.categories) == ["embed", *(f"{i}" for i in range(30))]
    (trace,) = chart.traces[""]
    frame = pd.read_json(path / "metrics.jsonl", lines=True)
    means = [frame[f"weights_changed/model.layers.{i}"].mean() for i in (0, 1)]
    assert axis.arrays.lists[trace["y"]][1:3] == pytest.approx(means, rel=1e-4)  # a page has five digits
