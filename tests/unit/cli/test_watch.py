"""The dashboard of `asyncrlhf watch`, driven by textual's pilot: a run that starts later, grows and ends; a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.records.write.rollout_rows import RolloutRow, write_part
from asyncrlhf.turns import Turn
from asyncrlhf.types import OBSERVED

pytest.importorskip("textual", reason="the extra watch is not installed")
from textual.widgets import DataTable, ProgressBar, Sparkline, Static

from asyncrlhf.cli.dashboard import Dashboard

NEVER = 3600.0  # seconds: the tests look when they want to


def add_steps(folder: Path, first: int, last: int, torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"steps": 10, "buffer": {"capacity": 64}}))
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            row = {
                "step": step,
                "reward_mean": step / 10,
                "staleness_mean": 1.5,
                "staleness_max": 2,
                "wall_time": 2.0 * step,
            }
            row |= {"staleness_bound": 2, "learner_idle_fraction": 0.25, "buffer_size": 32, "buffer_age": 1.0}
            row |= {f"generator/g-{i}/idle_fraction": 0.5 for i in range(2)}
            file.write(json.dumps(row) + "\n")
        file.write(torn)


def text(app: Any, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).render())


async def test_a_run_that_starts_later_and_grows(tmp_path: Path) -> None:
    app = Dashboard(tmp_path / "runs", NEVER, lambda: (run / "metrics.jsonl").stat().st_mtime)
    run = tmp_path / "runs" / "sums" / "today"
    async with app.run_test(size=(120, 60)) as pilot:
        assert "nothing has started here yet" in text(app, "#head")
        add_steps(run, 1, 3, torn='{"step": 4, "rewa')
        await pilot.press("r")
        await pilot.pause()
        assert "running. Step 3 of 10, 6.0 s, about 14 s left" in text(app, "#head")
        assert app.screen.query_one(ProgressBar).progress == 3
        curve = app.screen.query_one("#curve-reward_mean")
        assert curve.display and "0.3" in str(curve.query_one(Static).render())
        assert list(curve.query_one(Sparkline).data or ()) == pytest.approx([0.0, 0.1, 0.2])
        assert not app.screen.query_one("#curve-loss").display
        gauges = text(app, "#gauges")
        assert (
            "learner idle █████░" in gauges and "32 of 64 rollouts" in gauges and "1.50 mean, 2 max, bound 2" in gauges
        )
        assert app.screen.query_one("#replicas", DataTable).row_count == 2
        with (run / "metrics.jsonl").open("a") as file:
            file.write('rd_mean": 0.9}\n')
        (run / "rollouts").mkdir()
        rows = [
            RolloutRow(i, 0, f"1+{i}=", "trained", 0.0, response=f"[{i}]", reward=1.0, staleness=1) for i in range(4)
        ]
        write_part(run / "rollouts" / "part-00000.parquet", rows)
        (run / "summary.json").write_text('{"exit_reason": "done"}')
        await pilot.press("r")
        await pilot.pause()
        assert "done. Step 4 of 10" in text(app, "#head")
        table = app.screen.query_one("#rollouts", DataTable)
        assert [str(cell) for cell in table.get_row_at(0)] == ["3", "1", "1", "", "trained", "", "1+3=", "[3]"]


async def test_enter_shows_the_turns_of_an_episode_and_what_it_observed(tmp_path: Path) -> None:
    add_steps(tmp_path, 1, 2)
    turns = Turn(0, 1, "g-0", ("search",), 1.5, 1), Turn(3, 4, "g-1", reward=0.5)
    row = RolloutRow(7, 0, "1+3=", "trained", 0.0, "4!?4", 1.0, [4, OBSERVED, OBSERVED, 6], staleness=2, turns=turns)
    (tmp_path / "rollouts").mkdir()
    write_part(tmp_path / "rollouts" / "part-00000.parquet", [row])
    (tmp_path / "rollout_tokens").mkdir()
    tokens = {"rollout_id": [7], "tokens": [["4", "!", "?", "4"]], "policy_versions": [row.policy_versions]}
    pq.write_table(pa.table(tokens), tmp_path / "rollout_tokens" / "steps-1-2-rank-0.parquet")
    app = Dashboard(tmp_path, NEVER, lambda: 0.0)
    async with app.run_test(size=(120, 60)) as pilot:
        app.screen.query_one("#rollouts", DataTable).focus()
        await pilot.press("enter")
        await pilot.pause()
        assert "Rollout 7: trained, reward 1, staleness 2" in text(app, "#head")
        table = app.screen.query_one("#turns", DataTable)
        said = [[str(cell) for cell in table.get_row_at(i)] for i in range(2)]
        assert said[0] == ["1", "g-0", "4 to 4", "1", "2", "search", "1", "1.50", ""]
        assert said[1] == ["2", "g-1", "6 to 6", "1", "0", "", "0", "0.00", "0.5"]
        shown = app.screen.query_one("#response", Static).render()
        styled = {shown.plain[span.start : span.end] for span in shown.spans if span.style}
        assert shown.plain == "4!?4" and styled == {"!", "?"}, "what was observed looks different"
        await pilot.press("escape")
        assert app.screen.query("#rollouts")


async def test_a_sweep_shows_its_jobs_and_each_of_them(tmp_path: Path) -> None:
    jobs = [
        {"name": name, "folder": folder, "state": state, "seconds": seconds, "note": note}
        for name, folder, state, seconds, note in (
            ("lag=0,seed=0", "jobs/a", "done", 12.0, ""),
            ("lag=4,seed=0", "jobs/b", "running", 0.0, ""),
            ("lag=8,seed=0", "", "pending", 0.0, ""),
        )
    ]
    add_steps(tmp_path / "jobs/a", 1, 10)
    add_steps(tmp_path / "jobs/b", 1, 2)
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "name": "lags", "jobs": jobs}))
    app = Dashboard(tmp_path, NEVER, lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        assert "Sweep lags" in text(app, "#head") and "1 done, 1 running, 1 pending" in text(app, "#head")
        table = app.screen.query_one(DataTable)
        rows = [[str(cell) for cell in table.get_row_at(i)] for i in range(3)]
        assert rows[0][:4] == ["lag=0,seed=0", "done", "10/10", "1"] and rows[1][2] == "2/10" and rows[2][2] == ""
        await pilot.press("down", "enter")
        await pilot.pause()
        assert "jobs/b" in text(app, "#head") and "Step 2 of 10" in text(app, "#head")
        add_steps(tmp_path / "jobs/b", 3, 3)
        await pilot.press("r")
        await pilot.pause()
        assert "Step 3 of 10" in text(app, "#head")
        await pilot.press("escape")
        await pilot.press("r")
        await pilot.pause()
        assert str(app.screen.query_one(DataTable).get_row_at(1)[2]) == "3/10"


async def test_at_80_columns_a_curve_has_one_line_of_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    add_steps(run, 1, 9)
    row = {"step": 10, "ess_fraction": 0.98765, "behavior_kl": -0.00012345, "heldout_accuracy": 0.28515, "loss": -1e-5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps(row | {"step": 11, "behavior_kl": -123.456}) + "\n")
    app = Dashboard(run, NEVER, lambda: 0.0)
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.pause()
        shown = {
            name: app.screen.query_one(f"#curve-{name} .title", Static) for name in ("behavior_kl", "ess_fraction")
        }
        for name, title in shown.items():
            assert title.size.height == 1 and title.size.width <= 38, name
        assert str(shown["behavior_kl"].render()) == "behavior KL -123.5  -123 to -0.000123"
        assert len(str(shown["behavior_kl"].render())) <= shown["behavior_kl"].size.width


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["a", "b"], "watch takes one run or folder, not 2: a b."),
        (["--live"], "--live is not an option of watch."),
        ([], "watch draws on a terminal; for a page or a file: asyncrlhf report RUN."),
    ],
)
def test_what_cannot_be_watched(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *arguments]) == 2
    assert capsys.readouterr().err == f"asyncrlhf: {sentence}\n"


def test_without_textual_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["watch"]) == 2
    assert "asyncrlhf watch needs the package textual, which is not installed" in capsys.readouterr().err
