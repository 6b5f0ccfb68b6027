"""The results of a run: the dictionary of summary.json, and the same in plain sentences."""

from __future__ import annotations

import io
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import variance
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics

PACKAGES = ("asyncrlhf", "torch", "transformers", "ray", "numpy", "hydra-core", "pyarrow", "wandb", "vllm", "deepspeed")
REPLICA_PREFIX = "generator/"  # of the metrics of one replica
LEAST_STEPS = 5  # whose spread says how sure their mean is
_NAMED_FAILURES = 5
_TIMING_ENDINGS = ("_seconds", "_per_second", "_idle_fraction")

Metrics = Sequence[Mapping[str, Any]]


def build_summary(
    run_dir: Path,
    *,
    ledger: Mapping[str, Any],
    seed: int,
    steps_planned: int,
    staleness_bound: int,
    exit_reason: str,
    evaluated: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
    heldout_prompts: int = 0,
    heldout_measure: str = "accuracy",
) -> dict[str, Any]:
    """The content of summary.json, from ``run_dir``'s metrics.jsonl and the ledger's ``counts()``.

    ``exit_reason``: ``done``, ``interrupted`` or ``failed: <one sentence>``. ``evaluated``: the metrics of the first
    and last held-out evaluation; for a missing ``heldout_accuracy`` that of metrics.jsonl is used; ``heldout_prompts``:
    the number of its prompts; ``heldout_measure``: accuracy, if rewards are 0 or 1, or reward. First and last reward
    are the means of the first and last tenth of the steps (at least one step).
    """
    path = run_dir / METRICS_FILE
    rows = read_metrics(path) if path.exists() else []
    heldout = values(rows, "heldout_accuracy")
    before = evaluated[0].get("heldout_accuracy", heldout[0] if heldout else None)
    after = evaluated[1].get("heldout_accuracy", heldout[-1] if heldout else None)
    return {
        "run_dir": str(run_dir),
        "exit_reason": exit_reason,
        "steps": int(rows[-1]["step"]) if rows else 0,
        "steps_planned": steps_planned,
        "policy_version": rows[-1].get("policy_version") if rows else 0,
        "wall_seconds": rows[-1].get("wall_time") if rows else None,
        "seed": seed,
        "reward": reward_ends(rows),
        "heldout_accuracy": {
            "before": before,
            "after": after,
            "standard_error": _heldout_error(before, after, heldout_prompts if heldout_measure == "accuracy" else 0),
            "measure": heldout_measure,
        },
        "evaluations": {
            name: {"before": evaluated[0].get(name), "after": evaluated[1].get(name)}
            for name in dict.fromkeys([*evaluated[0], *evaluated[1]])
            if name != "heldout_accuracy"
        },
        "staleness": {
            "mean": mean(values(rows, "staleness_mean")),
            "max": max(values(rows, "staleness_max"), default=None),
            "bound": staleness_bound,
        },
        "timings": timing_means(rows),
        "generators": replica_means(rows),
        "ledger": ledger_totals(ledger),
        **environment(),
    }


def ledger_totals(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Admitted = trained + dropped + failed + left (not finished when the run ended), and whether this holds.

    ``counts`` is the result of the ledger's ``counts()``. ``uses`` counts every training of a rollout. Dropped and
    failed are numbers by reason; the five most frequent reasons of failures keep their names.
    """
    dropped = {reason: count for reason, count in counts["dropped_by_reason"].items() if count}
    failed = dict(sorted(counts["failed_by_reason"].items(), key=lambda item: -item[1]))
    named = dict(list(failed.items())[:_NAMED_FAILURES])
    if len(failed) > _NAMED_FAILURES:
        named["other reasons"] = sum(list(failed.values())[_NAMED_FAILURES:])
    left = sum(counts[state] for state in ("admitted", "generating", "scoring", "buffered"))
    total = counts["trained"] + sum(dropped.values()) + sum(named.values()) + left
    return {
        "admitted": counts["admitted_total"],
        "trained": counts["trained"],
        "uses": counts["uses"],
        "dropped": dropped,
        "failed": named,
        "left": left,
        "adds_up": total == counts["admitted_total"],
    }


def reward_ends(rows: Metrics) -> dict[str, Any]:
    """Mean reward of the first and of the last tenth of the steps, the steps per tenth, and the standard error of the
    difference, from the spread of the steps' means in each tenth; None if a tenth has too few steps."""
    rewards = values(rows, "reward_mean")
    window = max(1, len(rewards) // 10)
    first, last = rewards[:window], rewards[-window:]
    error = math.sqrt((variance(first) + variance(last)) / window) if window >= LEAST_STEPS else None
    return {"first": mean(first), "last": mean(last), "window": window, "standard_error": error}


def _heldout_error(before: float | None, after: float | None, prompts: int) -> float | None:
    """An upper bound of the standard error of the change: the value for 0/1 answers to different prompts each time.
    None without an evaluation, or with no ``prompts``."""
    ends = (before, after)
    if not prompts or any(end is None or not 0 <= end <= 1 for end in ends):
        return None
    return math.sqrt(sum(end * (1 - end) for end in ends if end is not None) / prompts)


def timing_means(rows: Metrics) -> dict[str, float]:
    """Means over the run: rates and fractions weighted by each step's wall time, seconds per step unweighted."""
    named = {key for row in rows for key in row if not key.startswith(REPLICA_PREFIX)}
    keys = sorted(key for key in named if key.endswith(_TIMING_ENDINGS))
    means = {
        key: (mean(values(rows, key)) if key.endswith("_seconds") else time_weighted_mean(rows, key)) for key in keys
    }
    return {key: value for key, value in means.items() if value is not None}


def replica_means(rows: Metrics) -> dict[str, dict[str, float]]:
    """Means of each replica over the steps in which it existed, by name; empty for a run with one replica.

    ``rollouts`` and ``tokens_per_second``: its output, trained or not; ``held_back_fraction``: the fraction of steps in
    which it got no work because it was too late for the staleness bound; ``restarts``: the last count.
    """
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(REPLICA_PREFIX))
    names = dict.fromkeys(key.split("/", 2)[1] for key in keys)
    return {name: _replica_row(rows, f"{REPLICA_PREFIX}{name}/") for name in names}


def _replica_row(rows: Metrics, prefix: str) -> dict[str, float]:
    weighted = {name: name for name in ("tokens_per_second", "idle_fraction", "latency", "lag", "in_flight")}
    weighted["held_back_fraction"] = "held_back"
    return {
        "rollouts": sum(values(rows, f"{prefix}rollouts")),
        **{name: time_weighted_mean(rows, prefix + key) or 0.0 for name, key in weighted.items()},
        "restarts": (values(rows, f"{prefix}restarts") or [0.0])[-1],
    }


def time_weighted_mean(rows: Metrics, key: str) -> float | None:
    """Mean of ``key`` weighted by the wall time since the line before; a plain mean where times are missing."""
    weights = [w for row, w in zip(rows, _step_seconds(rows), strict=True) if row.get(key) is not None]
    found, total = values(rows, key), sum(weights)
    return sum(v * w for v, w in zip(found, weights, strict=True)) / total if total > 0 else mean(found)


def _step_seconds(rows: Metrics) -> list[float]:
    """Wall time of each line since the line before; 0 where it is missing."""
    seconds, previous = [], 0.0
    for row in rows:
        now = row.get("wall_time")
        now = previous if now is None else now
        seconds.append(max(0.0, now - previous))
        previous = now
    return seconds


def values(rows: Metrics, key: str) -> list[float]:
    """The finite values of one metric, in order."""
    return [float(row[key]) for row in rows if row.get(key) is not None]


def mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def environment(*more: str) -> dict[str, Any]:
    """The machine, and the versions of installed packages that affect a run, with ``more`` ones."""
    packages = {}
    for name in (*PACKAGES, *more):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "git": git_state(Path(__file__).resolve().parent),
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository that tracks ``folder``'s files, and whether tracked files differ from it; else None."""
    if not _git(folder, "ls-files", "--", "."):
        return None  # no repository, or one (the user's own) in which this package is merely installed
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def plain_words(summary: Mapping[str, Any]) -> str:
    """Six to ten sentences and a small table that say what happened, for a terminal of 100 columns."""
    reward, heldout, staleness = summary["reward"], summary["heldout_accuracy"], summary["staleness"]
    timings, ledger, folder = summary["timings"], summary["ledger"], summary["run_dir"]
    lines = [_outcome(summary)]
    if reward["first"] is None:
        lines.append("No learner step was completed, so there is no reward to report.")
    else:
        steps = "step" if reward["window"] == 1 else f"{reward['window']} steps"
        lines.append(f"Mean reward {_moved(reward, 'first', 'last')} (first and last {steps}).")
    before, after = heldout["before"], heldout["after"]
    if before is not None and after is not None:
        measure = heldout.get("measure", "accuracy")
        lines.append(f"Held-out {measure}, on prompts never trained on, {_moved(heldout, 'before', 'after')}.")
    if moved := [
        f"{name.removeprefix('heldout_').removeprefix('heldout/')} {ends['before']:.3f} to {ends['after']:.3f}"
        for name, ends in (summary.get("evaluations") or {}).items()
        if ends["before"] is not None and ends["after"] is not None
    ]:
        lines.append(f"Other held-out figures: {', '.join(moved)}.")
    if staleness["max"] is not None:
        lines.append(
            f"The trained data was {staleness['mean']:.2f} policy versions old on average "
            f"and {staleness['max']:.0f} at most (bound: {staleness['bound']})."
        )
    sides = {"the learner": "learner_idle_fraction", "the generators": "generator_idle_fraction"}
    known = [f"{side} {100 * timings[key]:.0f}%" for side, key in sides.items() if key in timings]
    if known:
        lines.append(f"Waiting took {' and '.join(known)} of their time.")
    if "samples_per_second" in timings:
        tokens = f" ({timings['tokens_per_second']:,.0f} tokens/s)" if "tokens_per_second" in timings else ""
        lines.append(f"It trained {timings['samples_per_second']:,.1f} samples/s{tokens}.")
    if ledger["failed"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in ledger["failed"].items())
        failures = sum(ledger["failed"].values())
        lines.append(f"{failures:,} rollout{'s' * (failures > 1)} failed ({reasons}) and never reached training.")
    lines += [sentence for said in summary.get("sinks", {}).values() for sentence in said]
    lines.append(f"Everything is in {folder}; `asyncrlhf report {folder}` draws its curves.")
    if saved := list_checkpoints(Path(folder)):
        model = saved[-1] / LEARNER_FOLDER / "model"
        lines.append(f"Its model is in {model}; `asyncrlhf evaluate run={folder}` measures it.")
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, color_system=None)
    if summary.get("generators"):
        console.print(replica_table(summary["generators"]))
    console.print(ledger_table(ledger))
    return "\n".join(lines) + "\n\n" + buffer.getvalue().rstrip() + "\n"


def ledger_table(ledger: Mapping[str, Any]) -> Table:
    """The end state of every admitted rollout, with the check that none was lost or invented."""
    columns = "state", Column("rollouts", justify="right")
    table = Table(*columns, title="Where every rollout ended", title_justify="left")
    table.add_row("trained", f"{ledger['trained']:,}")
    for end in ("dropped", "failed"):
        for reason, count in ledger[end].items():
            table.add_row(f"{end}: {reason}", f"{count:,}")
    table.add_row("left when the run ended", f"{ledger['left']:,}", end_section=True)
    verdict = "adds up" if ledger["adds_up"] else "DOES NOT ADD UP: please report this"
    table.add_row(f"admitted ({verdict})", f"{ledger['admitted']:,}")
    return table


REPLICA_COLUMNS = ("rollouts", "tokens/s", "idle", "seconds per rollout", "lag", "held back", "restarts")


def replica_cells(figures: Mapping[str, float]) -> list[str]:
    """One replica's metrics as text, under ``REPLICA_COLUMNS``."""
    return [
        f"{figures['rollouts']:,.0f}",
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['idle_fraction']:.0%}",
        f"{figures['latency']:.3g}",
        f"{figures['lag']:.1f}",
        f"{figures['held_back_fraction']:.0%}",
        f"{figures['restarts']:.0f}",
    ]


def replica_table(replicas: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per generator, to find a straggler."""
    columns = [Column(name, justify="right") for name in REPLICA_COLUMNS]
    table = Table("name", *columns, title="Generators", title_justify="left")
    for name, figures in replicas.items():
        table.add_row(name, *replica_cells(figures))
    return table


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Seconds in readable form: ``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _outcome(summary: Mapping[str, Any]) -> str:
    reason, steps, planned = summary["exit_reason"], summary["steps"], summary["steps_planned"]
    took = f" in {duration(summary['wall_seconds'])}" if summary["wall_seconds"] is not None else ""
    if reason == "done":
        return f"Done: {steps} learner steps{took}, seed {summary['seed']}."
    if reason == "interrupted":
        return f"Interrupted after {steps} of {planned} learner steps{took}, seed {summary['seed']}; it can be resumed."
    cause = reason[:1].upper() + reason[1:]
    return f"The run stopped after {steps} of {planned} learner steps{took}, seed {summary['seed']}. {cause}"


def _moved(ends: Mapping[str, float | None], start: str, end: str) -> str:
    """A sentence about the change; it says ``rose`` or ``fell`` only beyond two standard errors."""
    first, last, error = ends[start], ends[end], ends.get("standard_error")
    assert first is not None and last is not None
    change = f"from {first:.3f} to {last:.3f}, a change of {last - first:+.3f}"
    if error is None:
        return f"went {change}"
    if abs(last - first) <= 2 * error:
        return f"went {change}, no more than its noise (standard error {error:.3f})"
    return f"{'rose' if last > first else 'fell'} {change} (standard error {error:.3f})"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
