"""Costs of a machine and model from the records of a run: spans, metrics and rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds

from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted, fit
from asyncrlhf.types import OBSERVED

LONG = 3.0  # times the median: a longer step was delayed by something else (a hiccup)
WARM_UP = 20  # first learner steps, left out, as of the figures that a simulation is compared with
LEAST = 20  # steps of a run from which costs are fitted; of one shorter than twice WARM_UP the second half
FITTED = ("decode", "train", "score", "snapshot", "transfer", "load", "submit", "collect")
SCORERS = ("reward", "reference", "critic")


def costs_of_run(run_dir: Path, *, cpu: bool = False, apart: bool = False) -> Fitted:
    """Linear costs. ``cpu``: in CPU seconds for generators, services and messages, if the parts recorded them; else by
    the parts' own clocks, so they include the contention between parts that share cores. ``apart``: the learner has
    cores of its own. Raises ValueError with one sentence if the run recorded too little."""
    spans = _columns(run_dir, "spans", "timeline")
    rows = _metrics(run_dir)
    metrics = rows[min(WARM_UP, len(rows) // 2) :]
    if len(rows) < LEAST:
        raise ValueError(f"{run_dir} is too short: costs need steps={LEAST} or more, and it has {len(rows)}.")
    late = spans["start"] >= metrics[0]["wall_time"]
    kinds, parts, passed = spans["kind"], spans["part"].astype(str), spans["end"] - spans["start"]
    computed = spans.get("cpu_seconds", np.zeros(len(kinds)))
    cpu = cpu and bool(computed[late].any()) and "shared_cpu_seconds" in metrics[0]
    own = computed if cpu else passed

    def mean(kind: str, seconds: np.ndarray = passed) -> float:
        chosen = late & (kinds == kind)
        return float(np.mean(seconds[chosen])) if chosen.any() else 0.0

    decode = late & (kinds == "decode")
    if not spans["iterations"][decode].any():
        raise ValueError(f"{run_dir} has no iterations of an engine; the fake engine records none.")
    iterations, sequences = spans["iterations"][decode], spans["sequence_iterations"][decode]
    busy = (computed if cpu else spans["busy_seconds"])[decode]
    # A part that waits for its core finds the caches cold: only where CPU seconds tell the two apart.
    waited = np.maximum(0.0, spans["busy_seconds"][decode] - busy) * cpu
    base, each, cold = fit(np.stack([iterations, sequences, waited], axis=1), busy)
    if cold * waited.sum() > 0.5 * busy.sum():  # the two cannot be told apart
        (base, each), cold = fit(np.stack([iterations, sequences], axis=1), busy), 0.0
    warm = 1.0 - cold * waited.sum() / busy.sum()  # share of the seconds that a replica which never waits would take
    # Arriving prompts, steps with a delay, and iterations counted in the span before their end make a fit low.
    whole = warm * busy.sum() / (base * iterations + each * sequences).sum()
    snapshot, load, transfer = mean("snapshot"), mean("load", own), mean("transfer")
    published = [row["weight_sync_seconds"] for row in metrics if row.get("weight_sync_seconds")]
    if published and not cpu:
        transfer = max(0.0, float(np.mean(published)) - snapshot - load)
    score = {}
    for kind in SCORERS:
        chosen = late & (kinds == "score") & np.char.startswith(parts, kind)
        if chosen.any():
            calls = np.stack([np.ones(chosen.sum()), spans["rollouts"][chosen]], axis=1)
            score[kind] = fit(calls, own[chosen])
    answered = late & (kinds == "wait") & ~np.char.startswith(parts, "learner") & (parts != "publisher")
    message = 0.0 if cpu else _message(run_dir, mean("score"))
    known = (parts != "publisher") & ~(apart & np.char.startswith(parts, "learner"))
    train = late & (kinds == "train")  # of a learner that waits for its core, too
    share = float(computed[train].sum() / passed[train].sum()) if cpu and not apart else 1.0
    used = computed[late & known].sum(), computed[answered].sum()
    return Fitted(
        decode_terms=(whole * base, whole * each, 0.0),
        train_terms=_step_terms(metrics, share),
        score_terms=score,  # type: ignore[arg-type]
        snapshot=snapshot,
        transfer=transfer,
        load=load,
        submit=message,
        collect=message,
        sources=dict.fromkeys(FITTED, "fitted"),
        **({"cold": cold} | _controller(metrics, *map(float, used)) if cpu else {}),
    )


def _controller(metrics: Sequence[Mapping[str, Any]], parts: float, answering: float) -> dict[str, float]:
    """``call``, ``message`` and ``others`` of Fitted, by the steps with many and few calls. ``parts``: CPU seconds of
    the parts on its cores, of which ``answering`` while they waited for work: each call has its share of these."""
    rows = metrics[1:]
    names = "remote_calls", "controller_cpu_seconds", "shared_cpu_seconds"
    calls, used, whole = ([row[name] for row in rows] for name in names)
    call, message = fit([[made, 3 * row["sequences"]] for made, row in zip(calls, rows, strict=True)], used)
    others = max(0.0, sum(whole) - sum(used) - parts) / (rows[-1]["wall_time"] - metrics[0]["wall_time"])
    return {"call": call + answering / sum(calls), "message": message, "others": others}


def _message(run_dir: Path, scoring: float) -> float:
    """Seconds of one message: a rollout is scored three of them and one call of the reward worker after its end."""
    rollouts = _columns(run_dir, "rollouts", "rollouts", ["generated_at", "scored_at"])
    passed = rollouts["scored_at"] - rollouts["generated_at"]
    passed = passed[np.isfinite(passed)][len(passed) // 3 :]  # the first ones meet workers that start
    return max(0.0, float(np.median(passed)) - scoring) / 3 if len(passed) else 0.0


def workload_of_run(run_dir: Path, cut: Sequence[int] = (), longest: int = 0) -> Workload:
    """Response lengths of trained and of dropped rollouts; ``cut``, ``longest``: see :meth:`Workload.from_lengths`."""
    rollouts = _columns(run_dir, "rollouts", "rollouts", ["policy_versions"])
    given = [versions for versions in rollouts["policy_versions"] if versions is not None and len(versions)]
    lengths = [int(np.count_nonzero(versions != OBSERVED)) for versions in given]
    rows = [row for row in _metrics(run_dir) if row.get("sequences")]
    prompts = [(row["tokens"] - row["response_tokens"]) / row["sequences"] for row in rows]
    return Workload.from_lengths(float(np.mean(prompts)) if prompts else 0.0, lengths, cut, longest)


def hiccups_of_run(run_dir: Path) -> tuple[float, float]:
    """(hiccups per hour of training, extra seconds of one): train steps longer than LONG times the median."""
    rows = _metrics(run_dir)
    seconds = np.array([row["train_seconds"] for row in rows[min(WARM_UP, len(rows) // 2) :]])
    usual = float(np.median(seconds))
    long = seconds[seconds > LONG * usual]
    return (3600 * len(long) / float(seconds.sum()), float(np.mean(long) - usual)) if len(long) else (0.0, 0.0)


def _step_terms(metrics: Sequence[Mapping[str, Any]], share: float) -> tuple[float, float]:
    """Seconds per step and per token, fitted to ``share`` of the time between two steps minus the learner's wait (so
    the controller's work is included); steps with a hiccup are left out."""
    seconds = [later["wall_time"] - row["wall_time"] - later["wait_seconds"] for row, later in pairwise(metrics)]
    calm = np.array(seconds) <= LONG * np.median(seconds)
    rows = np.array([[1.0, row["tokens"]] for row in metrics[1:]])
    return fit(rows[calm], share * np.array(seconds)[calm])  # type: ignore[return-value]


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error


def _columns(run_dir: Path, folder: str, what: str, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    if not any((run_dir / folder).glob("*.parquet")):
        raise ValueError(f"{run_dir} has no {what}: {folder}/ is empty.")
    table = ds.dataset(run_dir / folder).to_table(columns=None if names is None else list(names))
    return {name: table.column(name).to_numpy() for name in table.column_names}
