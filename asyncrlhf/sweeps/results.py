"""A sweep's results: quality against measured staleness, and wall-clock time, with standard errors.

Everything is recomputed from the runs' own files. Quality is the held-out accuracy after training, or, without held-out
prompts, the mean reward of the last tenth of the steps. Speed is reported only for jobs that ran alone on the machine.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics, read_summary
from asyncrlhf.records.write.run_lock import is_owned
from asyncrlhf.sweeps.record import after_a_kill, read_sweep
from asyncrlhf.sweeps.search import objective

# Settings that affect staleness. All other choices are the method, which is compared.
BOUND_KEYS = ("async", "async.mode", "async.lag", "async.max_staleness")
STALENESS_KEYS = (
    *BOUND_KEYS, "async.min_staleness", "weights.publish_every", "buffer.max_reuse", "generator.replicas",
    "buffer.replay_fraction",
)  # fmt: skip
CACHE_KEY = "generator.cache"  # with its own settings: how much the sampler remembers, the second axis
FRESH = 0.05  # policy versions: a configuration at most this stale on average is a baseline
ONLY_METHOD = "the run"  # the method's name if only staleness differs
_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?|true|false", re.IGNORECASE)
SMALL = 1e-3  # a baseline's quality below this makes no ratio


@dataclass(frozen=True)
class Point:
    """One finished job. ``exclusive``: it ran alone, on a real clock (that of ``runtime=local`` is virtual).
    ``staleness``: mean over the steps, in policy versions. ``train_seconds``: the run's own clock from the first step's
    beginning to the last step's end. ``bound``: the lag or the bound of its mode, in policy versions; None if another
    choice affects staleness too. ``cache``: the choice of ``generator.cache`` in words, which the method has too, and
    ``learner`` the method without it. ``room``: the mean share of a response that the cache still holds at its end.
    ``corrected``: whether the loss weighs samples by their importance."""

    name: str
    path: Path
    exclusive: bool
    method: str
    setting: str
    seed: int
    quality: float
    staleness: float
    train_seconds: float
    mode: str
    bound: int | None
    cache: str
    learner: str
    room: float
    corrected: bool


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error (NaN for a single one)."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error, len(values))

    @classmethod
    def of_ratio(cls, pairs: Sequence[tuple[float, float]]) -> Estimate:
        """The mean of the second values over the mean of the first, with the error of both: that of the ratio's
        residual in each pair (the delta method for paired samples; Cochran, Sampling Techniques, 6.3)."""
        base = statistics.fmean(first for first, _ in pairs)
        ratio = statistics.fmean(second for _, second in pairs) / base
        return cls(ratio, cls.of([(second - ratio * first) / base for first, second in pairs]).error, len(pairs))

    def text(self, scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
        middle = f"{self.mean * scale:.{digits}f}"
        return f"{middle}{unit}" if math.isnan(self.error) else f"{middle} ± {self.error * scale:.{digits}f}{unit}"


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep: its points, one per seed. ``kept``: its mean quality relative to the method's
    freshest configuration on the same seeds; None if it is that one, or if that one's quality is close to 0."""

    method: str
    setting: str
    exclusive: bool
    points: tuple[Point, ...]
    kept: Estimate | None = None
    speedup: Estimate | None = None  # of sync's wall-clock for the same steps, paired by seed; exclusive jobs only

    @property
    def quality(self) -> Estimate:
        return Estimate.of([point.quality for point in self.points])

    @property
    def staleness(self) -> Estimate:
        return Estimate.of([point.staleness for point in self.points])

    @property
    def seconds(self) -> Estimate:
        return Estimate.of([point.train_seconds for point in self.points])

    @property
    def bound(self) -> int | None:
        return self.points[0].bound

    @property
    def room(self) -> float:
        return statistics.fmean(point.room for point in self.points)


@dataclass(frozen=True)
class Results:
    """``left_out``: jobs without a result, with their state. ``what``: the name of the quality."""

    name: str
    cells: tuple[Cell, ...]
    left_out: dict[str, str]
    what: str
    search: str = ""  # the sentence about a search's best trial

    @property
    def runs(self) -> list[Path]:
        """The run directories of the results: the last attempt of each finished job."""
        return [point.path for cell in self.cells for point in cell.points]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.cells))


def read_results(folder: Path) -> Results:
    """Raises ConfigError for a folder without a readable ``sweep.json``."""
    document = read_sweep(folder)
    left = [row for row in document["jobs"] if row["state"] == "running"]
    if left and not is_owned(folder):
        for row in left:
            row["state"] = after_a_kill(folder / row["folder"])
    rows = [row for row in document["jobs"] if row["state"] == "done"]
    left_out = {row["name"]: row["state"] for row in document["jobs"] if row["state"] != "done"}
    several = any("algorithm" in row["choices"] for row in rows)
    measured = [(read_summary(folder / row["folder"]) or {}).get("heldout_accuracy") or {} for row in rows]
    heldout = all(found.get("after") is not None for found in measured)
    points = []
    for row in rows:
        try:
            points.append(_point(folder, row, heldout, several))
        except (ConfigError, LookupError, ValueError, OSError) as error:
            left_out[row["name"]] = f"unreadable ({' '.join(str(error).split())})"
    measure = "reward" if any(found.get("measure") == "reward" for found in measured) else "accuracy"
    what = f"held-out {measure}" if heldout else "reward of the last tenth of the steps"
    cells = _cells(points)
    cells = [_with_kept(cell, cells) for cell in cells]
    cells = [_with_speed(cell, cells) for cell in cells]
    return Results(document["name"], tuple(cells), left_out, what, best_trial(folder, document))


def best_trial(folder: Path, document: dict[str, Any]) -> str:
    """A sentence that names the trial of a search with the best objective; empty for a sweep without a search."""
    search = document.get("search")
    if not search:
        return ""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in document["jobs"]:
        rows.setdefault(row["part"], []).append(row)
    whole = {part: of for part, of in rows.items() if all(row["state"] == "done" for row in of)}
    values = {
        part: [objective(folder / row["folder"], search["objective"]) for row in of] for part, of in whole.items()
    }
    known = {part: Estimate.of([v for v in of if v is not None]) for part, of in values.items() if None not in of}
    if not known:
        return f"No trial of the search has a {search['objective']} yet."
    best = (max if search["direction"] == "maximize" else min)(known, key=lambda part: known[part].mean)
    said = ", ".join(f"{key}={value}" for key, value in rows[best][0]["choices"].items())
    count = f"{known[best].count} seed{'s' * (known[best].count != 1)}"
    return (
        f"Best of {len(known)} trials: {search['objective']} {known[best].text()} ({count}) with {said} ({best}). "
        "The best of many is partly luck: run it again with other seeds."
    )


def _point(folder: Path, row: dict[str, Any], heldout: bool, several: bool) -> Point:
    """The job's point. ``several``: other jobs choose an algorithm, so a job without a choice gets its default's
    name."""
    path = folder / row["folder"]
    summary = read_summary(path)
    metrics = [line for line in read_metrics(path / METRICS_FILE) if "step" in line]
    if summary is None or not metrics:
        raise ConfigError(f"{path} has no summary or no steps.")
    choices, asynchrony = row["choices"], row["config"]["async"]
    setting = _words({key: value for key, value in choices.items() if key in STALENESS_KEYS}) or asynchrony["mode"]
    if setting in ("async", "fill"):  # the free-running groups of conf/async
        setting = f"async, max_staleness {asynchrony['max_staleness']}"
    compared = {key: value for key, value in choices.items() if key not in STALENESS_KEYS}
    algorithm = row["config"].get("algorithm", {})
    name = algorithm.get("name", "")
    if several and "algorithm" not in choices and name:
        compared = {"algorithm": name, **compared}
    learner = {key: value for key, value in compared.items() if not key.startswith(CACHE_KEY)}
    cache = {key: value for key, value in compared.items() if key not in learner}
    quality = summary["heldout_accuracy"]["after"] if heldout else summary["reward"]["last"]
    return Point(
        row["name"],
        path,
        row["timing"] == "exclusive" and row["config"].get("runtime") != "local",
        _words(compared) or ONLY_METHOD,
        setting,
        row["seed"],
        float(quality),
        statistics.fmean(line["staleness_mean"] for line in metrics),
        float(metrics[-1]["wall_time"]),
        asynchrony["mode"],
        None if any(key in choices for key in STALENESS_KEYS if key not in BOUND_KEYS) else _bound(asynchrony),
        _words(cache),
        _words(learner),
        statistics.fmean(line.get("cache_kept_fraction", 1.0) for line in metrics),
        algorithm.get("correction", "none") != "none" or algorithm.get("anchor") == "mu",
    )


def _bound(asynchrony: dict[str, Any]) -> int:
    mode = asynchrony["mode"]
    return (
        int(asynchrony["lag"])
        if mode == "fixed_lag"
        else {"sync": 0, "one_step": 1}.get(mode, asynchrony["max_staleness"])
    )


def _words(choices: dict[str, str]) -> str:
    """The choices in words, ``algorithm=grpo`` as ``grpo``: names are clear without their setting, numbers are not."""
    said = []
    for key, value in choices.items():
        value = re.sub(r"^\{'policy': |['{}]", "", value).replace(": ", " ") if value.startswith("{") else value
        said.append(f"{key.rpartition('.')[2]} {value}" if _NUMBER.fullmatch(value) else value)
    return ", ".join(said)


def _cells(points: Sequence[Point]) -> list[Cell]:
    found: dict[tuple[str, str, bool], list[Point]] = {}
    for point in points:
        found.setdefault((point.method, point.setting, point.exclusive), []).append(point)
    cells = [Cell(*key, tuple(sorted(members, key=lambda p: p.seed))) for key, members in found.items()]
    return sorted(cells, key=lambda cell: (cell.exclusive, cell.method, cell.staleness.mean))


def paired(cell: Cell, base: Cell, of: Callable[[Point], float]) -> list[tuple[float, float]]:
    """(base's value, own value) for each seed that both have."""
    values = {point.seed: of(point) for point in base.points}
    return [(values[point.seed], of(point)) for point in cell.points if point.seed in values]


def _with_kept(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """Set the cell's quality relative to the freshest configuration, over the seeds that both have."""
    peers = [c for c in cells if c.method == cell.method and c.exclusive == cell.exclusive]
    base = min(peers, key=lambda c: c.staleness.mean)
    pairs = paired(cell, base, lambda point: point.quality)
    middle = statistics.fmean(b for b, _ in pairs) if pairs else 0.0
    usable = base is not cell and base.staleness.mean <= FRESH and middle > SMALL
    return replace(cell, kept=Estimate.of_ratio(pairs)) if usable else cell


def _with_speed(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """Set the cell's speed-up: sync's wall-clock time over its own, by seed, where both ran alone."""
    base = next((c for c in cells if c.method == cell.method and c.exclusive and c.points[0].mode == "sync"), None)
    if not cell.exclusive or base is None or base is cell:
        return cell
    pairs = paired(cell, base, lambda point: point.train_seconds)
    return replace(cell, speedup=Estimate.of([b / own for b, own in pairs])) if pairs else cell
