"""The screens of ``asyncrlhf watch``: one run, or the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, ProgressBar, Sparkline, Static

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.follow import RunFollower, newest_run, recorded_tokens
from asyncrlhf.records.show.summary import duration
from asyncrlhf.sweeps.record import is_sweep, read_sweep
from asyncrlhf.types import OBSERVED

CURVES = (
    ("reward_mean", "reward"),
    ("heldout_accuracy", "held-out"),
    ("staleness_mean", "staleness"),
    ("ess_fraction", "ESS"),
    ("behavior_kl", "behavior KL"),
    ("loss", "loss"),
    ("samples_per_second", "samples/s"),
    ("entropy", "entropy"),
)
GAUGES = (("learner idle", "learner_idle_fraction"), ("generators idle", "generator_idle_fraction"))
REPLICA_FIGURES = ("tokens_per_second", "idle_fraction", "lag", "in_flight", "latency", "held_back", "restarts")
MAX_POINTS = 400  # of a curve, the newest; the widget draws at most its own width
TURN_FIGURES = ("turn", "replica", "versions", "sampled", "observed", "tools", "failed", "seconds", "reward")
SEEN = "italic cyan"  # the style of observed tokens
CELL = 60  # characters of a prompt or a response


class Curve(Vertical):
    """One metric: its name, its newest value with the range, and a line of bars."""

    def __init__(self, metric: str, title: str) -> None:
        super().__init__(id=f"curve-{metric}", classes="curve")
        self._metric, self._title = metric, title

    def compose(self) -> ComposeResult:
        yield Static(classes="title")
        yield Sparkline([], summary_function=lambda part: sum(part) / len(part))

    def show(self, run: RunFollower) -> None:
        values = run.values(self._metric)
        self.display = bool(values)
        if values:
            low, high = min(values), max(values)
            text = f"[b]{self._title}[/b] {values[-1]:.4g}  [dim]{low:.3g} to {high:.3g}[/dim]"
            self.query_one(Static).update(text)
            # The widget draws from 0 up: values are scaled to the curve's own range.
            self.query_one(Sparkline).data = [value - low for value in values[-MAX_POINTS:]]


class RunScreen(Screen[None]):
    """``find`` returns the run to follow, which may change later, or None if there is none yet."""

    def __init__(self, find: Callable[[], Path | None], where: Path, now: Callable[[], float]) -> None:
        super().__init__()
        self._find, self._where, self._now = find, where, now
        self._run: RunFollower | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield ProgressBar(id="progress", show_eta=False)
        with VerticalScroll():
            yield Grid(*(Curve(metric, title) for metric, title in CURVES), id="curves")
            yield Static(id="gauges")
            yield DataTable(id="replicas", cursor_type="none")
            yield DataTable(id="rollouts", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#replicas", DataTable).add_columns("replica", *(f.replace("_", " ") for f in REPLICA_FIGURES))
        columns = ("rollout", "reward", "staleness", "turns", "state", "replica", "prompt", "response")
        self.query_one("#rollouts", DataTable).add_columns(*columns)
        self.look()

    def look(self) -> None:
        """Read the files again and draw their values."""
        path = self._find()
        if path is None:
            self.query_one("#head", Static).update(Text(f"{self._where}: nothing has started here yet."))
            return
        if self._run is None or self._run.path != path:
            self._run = RunFollower(path)
        run = self._run
        run.read()
        done, planned = run.steps
        self.query_one("#head", Static).update(self._headline(run, done, planned))
        self.query_one("#progress", ProgressBar).update(total=planned or None, progress=done)
        for curve in self.query(Curve):
            curve.show(run)
        self.query_one("#gauges", Static).update(_gauges(run))
        _fill(self.query_one("#replicas", DataTable), _replica_rows(run))
        _fill(self.query_one("#rollouts", DataTable), _rollout_rows(run))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        chosen = (
            [row for row in self._run.rollouts if str(row["rollout_id"]) == event.row_key.value] if self._run else []
        )
        if self._run is not None and chosen:
            self.app.push_screen(RolloutScreen(self._run.path, chosen[0]))

    def _headline(self, run: RunFollower, done: int, planned: int) -> Text:
        seconds = run.last.get("wall_time")
        took = f", {duration(seconds)}" if seconds else ""
        left = seconds / done * (planned - done) if seconds and done and not run.summary else 0
        eta = f", about {duration(left)} left" if left > 0 else ""
        return Text(f"{run.path}: {run.state(self._now())}. Step {done} of {planned or '?'}{took}{eta}")


class RolloutScreen(Screen[None]):
    """One rollout: its turns and its text, in which observed tokens look different from sampled ones if
    ``rollout_tokens`` has the rollout."""

    def __init__(self, run_dir: Path, row: dict[str, Any]) -> None:
        super().__init__()
        self._run_dir, self._row = run_dir, row

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with VerticalScroll():
            yield DataTable(id="turns", cursor_type="none")
            yield Static(id="prompt")
            yield Static(id="response")
        yield Footer()

    def on_mount(self) -> None:
        row = self._row
        facts = [f"Rollout {row['rollout_id']}: {row['state']}, reward {_number(row['reward']) or 'none'}"]
        facts += [f"the environment's {_number(row['episode_reward'])}"] if row["episode_reward"] is not None else []
        facts += [f"staleness {row['staleness']}"] if row["staleness"] is not None else []
        self.query_one("#head", Static).update(Text(", ".join(facts)))
        table, turns = self.query_one("#turns", DataTable), _turn_rows(row)
        table.add_columns(*TURN_FIGURES)
        _fill(table, turns)
        table.display = bool(turns)
        tokens = recorded_tokens(self._run_dir, row["rollout_id"])
        response = Text.assemble(*((text, "" if own else SEEN) for text, own in tokens)) if tokens else None
        self.query_one("#prompt", Static).update(Text(row["prompt"] or "", style="dim"))
        self.query_one("#response", Static).update(response or Text(row["response"] or ""))


class SweepScreen(Screen[None]):
    """The jobs of a sweep; Enter opens the job under the cursor."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        super().__init__()
        self._folder, self._now = folder, now
        self._runs: dict[str, RunFollower] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield ProgressBar(id="progress", show_eta=False)
        yield Horizontal(DataTable(id="jobs", cursor_type="row"))
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(
            "job", "state", "step", "reward", "held-out", "staleness", "seconds", "note"
        )
        self.look()

    def look(self) -> None:
        try:
            document = read_sweep(self._folder)
        except ConfigError as error:  # half written
            self.query_one("#head", Static).update(Text(str(error)))
            return
        jobs = document["jobs"]
        done = sum(job["state"] == "done" for job in jobs)
        states = {
            state: sum(job["state"] == state for job in jobs) for state in dict.fromkeys(j["state"] for j in jobs)
        }
        words = ", ".join(f"{count} {state}" for state, count in states.items())
        self.query_one("#head", Static).update(Text(f"Sweep {document['name']} in {self._folder}: {words}."))
        self.query_one("#progress", ProgressBar).update(total=len(jobs), progress=done)
        rows = {}
        for job in jobs:
            run = self._follow(job["folder"]) if job["folder"] else None
            last = run.last if run is not None else {}
            step = f"{run.steps[0]}/{run.steps[1] or '?'}" if run is not None else ""
            figures = [_number(last.get(key)) for key in ("reward_mean", "heldout_accuracy", "staleness_mean")]
            seconds = f"{job['seconds']:.0f}" if job["seconds"] else ""
            rows[job["folder"] or job["name"]] = (job["name"], job["state"], step, *figures, seconds, job["note"])
        _fill(self.query_one(DataTable), rows)

    def _follow(self, folder: str) -> RunFollower:
        run = self._runs.setdefault(folder, RunFollower(self._folder / folder))
        run.read()
        return run

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        path = self._folder / str(event.row_key.value)
        if path.is_dir():
            self.app.push_screen(RunScreen(lambda: path, path, self._now))


class Dashboard(App[None]):
    """``seconds`` between two updates; ``now`` in seconds since the epoch."""

    CSS = """
    #head { padding: 0 1; text-style: bold; }
    #progress { padding: 0 1; }
    #curves { grid-size: 2; grid-gutter: 1 2; grid-rows: 4; height: auto; padding: 1; }
    .curve { height: 4; }
    .curve .title { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    .curve Sparkline { height: 3; }
    #gauges { padding: 0 1 1 1; }
    #replicas, #rollouts, #turns { height: auto; max-height: 20; margin: 0 1 1 1; }
    #prompt, #response { padding: 0 1; }
    """
    BINDINGS = [("q", "quit", "Quit"), ("r", "look", "Read again"), ("escape", "back", "Back")]  # noqa: RUF012
    ENABLE_COMMAND_PALETTE = False
    TITLE = "asyncrlhf watch"

    def __init__(self, path: Path, seconds: float, now: Callable[[], float]) -> None:
        super().__init__()
        self._path, self._seconds, self._now = path, seconds, now

    def on_mount(self) -> None:
        if is_sweep(self._path):
            self.push_screen(SweepScreen(self._path, self._now))
        else:
            self.push_screen(RunScreen(self._found, self._path, self._now))
        self.set_interval(self._seconds, self.action_look)

    def _found(self) -> Path | None:
        """The run itself, or the newest below the folder."""
        return newest_run(self._path) if self._path.is_dir() else None

    def action_look(self) -> None:
        if isinstance(self.screen, RunScreen) and is_sweep(self._path) and len(self.screen_stack) == 2:
            self.switch_screen(SweepScreen(self._path, self._now))  # it started after this was opened
        elif isinstance(self.screen, RunScreen | SweepScreen):
            self.screen.look()

    async def action_back(self) -> None:
        if len(self.screen_stack) > 2:
            self.pop_screen()


def _gauges(run: RunFollower) -> str:
    last, parts = run.last, []
    for title, key in GAUGES:
        if (share := last.get(key)) is not None:
            filled = round(20 * share)
            parts.append(f"{title} [b]{'█' * filled}{'░' * (20 - filled)}[/b] {share:.0%}")
    capacity = (run.config.get("buffer") or {}).get("capacity")
    if last.get("buffer_size") is not None:
        of = f" of {capacity}" if capacity else ""
        parts.append(
            f"buffer [b]{last['buffer_size']:.0f}[/b]{of} rollouts, {last.get('buffer_age', 0):.1f} versions old"
        )
    if last.get("staleness_max") is not None:
        parts.append(
            f"staleness [b]{last['staleness_mean']:.2f}[/b] mean, {last['staleness_max']:.0f} max, "
            f"bound {last.get('staleness_bound', 0):.0f}"
        )
    if last.get("tokens_per_second") is not None:
        parts.append(f"[b]{last['tokens_per_second']:,.0f}[/b] tokens/s trained, {last.get('dropped', 0):.0f} dropped")
    return "\n".join(parts)


def _replica_rows(run: RunFollower) -> dict[str, tuple[str, ...]]:
    return {
        name: (name, *(_number(figures.get(key)) for key in REPLICA_FIGURES)) for name, figures in run.replicas.items()
    }


def _rollout_rows(run: RunFollower) -> dict[str, tuple[str, ...]]:
    rows: dict[str, tuple[str, ...]] = {}
    for row in run.rollouts:
        texts = (_one_line(row["prompt"]), _one_line(row["response"]))
        turns = str(len(row["turns"])) if row["turns"] else ""
        figures = (_number(row["reward"]), _number(row["staleness"]), turns, row["state"], row["generator_id"] or "")
        rows[str(row["rollout_id"])] = (str(row["rollout_id"]), *figures, *texts)
    return rows


def _turn_rows(row: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """One row per turn of a rollout."""
    rows: dict[str, tuple[str, ...]] = {}
    turns: Sequence[dict[str, Any]] = row["turns"] or ()
    ends = [*(turn["start"] for turn in turns[1:]), len(row["policy_versions"] or ())]
    for number, (turn, end) in enumerate(zip(turns, ends, strict=False), 1):
        versions = [v for v in row["policy_versions"][turn["start"] : turn["end"]] if v != OBSERVED]
        span = f"{min(versions)} to {max(versions)}" if versions else ""
        counts = (str(turn["end"] - turn["start"]), str(end - turn["end"]))
        figures = (", ".join(turn["tools"]), str(turn["failures"]), f"{turn['seconds']:.2f}", _number(turn["reward"]))
        rows[str(number)] = (str(number), turn["generator_id"] or "", span, *counts, *figures)
    return rows


def _one_line(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words if len(words) <= CELL else f"{words[: CELL - 1]}…"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _fill(table: DataTable[Text], rows: dict[str, tuple[str, ...]]) -> None:
    """Draw the rows; existing rows keep their place and the cursor."""
    keys = [str(key.value) for key in table.rows]
    columns = list(table.columns)
    if keys != list(rows):
        table.clear()
        for key, cells in rows.items():
            table.add_row(*(Text(cell) for cell in cells), key=key)
        return
    for key, cells in rows.items():
        for column, cell in zip(columns, cells, strict=True):
            table.update_cell(key, column, Text(cell))
