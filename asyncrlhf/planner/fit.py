"""Costs of a machine and model out of what a run recorded: its spans, its metrics and its rollouts."""

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

LONG = 3.0  # times the median: a step that something else prolonged
WARM_UP = 10  # learner steps whose costs are those of a start
SCORERS = ("reward", "reference", "critic")


def costs_of_run(run_dir: Path) -> Fitted:
    """Linear costs; every figure is of the controller's clock or of the part's own spans, so that what parts cost each
    other on shared cores is in them. Raises ValueError with one sentence where the run recorded too little."""
    spans = _columns(run_dir, "spans", "timeline (logging.spans)")
    metrics = [row for row in _metrics(run_dir) if row["step"] > WARM_UP]
    if len(metrics) < WARM_UP:
        raise ValueError(f"{run_dir} has {len(metrics)} steps after the first {WARM_UP}; {WARM_UP} are needed.")
    began = metrics[0]["wall_time"]
    late = spans["start"] >= began
    kinds, parts = spans["kind"], spans["part"]

    def mean(kind: str) -> float:
        chosen = late & (kinds == kind)
        return float(np.mean(spans["end"][chosen] - spans["start"][chosen])) if chosen.any() else 0.0

    decode = late & (kinds == "decode") & (spans["iterations"] > 0)
    if not decode.any():
        raise ValueError(f"{run_dir} has no iterations of an engine: the fake engine makes tokens by the clock.")
    iterations, sequences = spans["iterations"][decode], spans["sequence_iterations"][decode]
    base, each = fit(np.stack([iterations, sequences], axis=1), spans["busy_seconds"][decode])
    snapshot, load = mean("snapshot"), mean("load")
    published = [row["weight_sync_seconds"] for row in metrics if row.get("weight_sync_seconds")]
    transfer = max(0.0, float(np.mean(published)) - snapshot - load) if published else mean("transfer")
    score = {}
    for kind in SCORERS:
        chosen = late & (kinds == "score") & np.char.startswith(parts.astype(str), kind)
        if chosen.any():
            rows = np.stack([np.ones(chosen.sum()), spans["rollouts"][chosen]], axis=1)
            score[kind] = fit(rows, (spans["end"] - spans["start"])[chosen])
    iteration = float(spans["busy_seconds"][decode].sum() / iterations.sum())
    message = _message(run_dir, iteration, began)
    return Fitted(
        decode_terms=(base, each, 0.0),
        train_terms=_step_terms(metrics),
        score_terms=score,  # type: ignore[arg-type]
        snapshot=snapshot,
        transfer=transfer,
        load=load,
        submit=message,
        collect=message,
        sources=dict.fromkeys(
            ("decode", "train", "score", "snapshot", "transfer", "load", "submit", "collect"), "fitted"
        ),
    )


def _message(run_dir: Path, iteration: float, began: float) -> float:
    """Seconds of one message: half of what the quickest tenth of rollouts took over its own iterations."""
    rollouts = _columns(run_dir, "rollouts", "rollouts", ["admitted_at", "generated_at", "policy_versions"])
    lengths = np.array([len(versions) for versions in rollouts["policy_versions"]])
    over = rollouts["generated_at"] - rollouts["admitted_at"] - lengths * iteration
    over = over[np.isfinite(over)]
    return max(0.0, float(np.quantile(over, 0.1)) / 2) if len(over) else 0.0


def workload_of_run(run_dir: Path) -> Workload:
    """The response lengths that the run recorded. They are of trained and dropped rollouts alike."""
    rollouts = _columns(run_dir, "rollouts", "rollouts", ["policy_versions"])
    lengths = [len(versions) for versions in rollouts["policy_versions"] if versions is not None and len(versions)]
    rows = _metrics(run_dir)
    prompts = [(row["tokens"] - row["response_tokens"]) / row["sequences"] for row in rows if row.get("sequences")]
    return Workload.from_lengths(float(np.mean(prompts)) if prompts else 0.0, lengths)


def hiccups_of_run(run_dir: Path) -> tuple[float, float]:
    """(stops an hour of training, seconds of one): train steps that took LONG times the median."""
    seconds = np.array([row["train_seconds"] for row in _metrics(run_dir) if row["step"] > WARM_UP])
    usual = float(np.median(seconds))
    long = seconds[seconds > LONG * usual]
    return (3600 * len(long) / float(seconds.sum()), float(np.mean(long) - usual)) if len(long) else (0.0, 0.0)


def _step_terms(metrics: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of a step and of a token in it: of all that the learner did not wait, the controller's own work between
    two steps included, without the steps that a hiccup prolonged."""
    pairs = list(pairwise(metrics))
    seconds = [later["wall_time"] - row["wall_time"] - later["wait_seconds"] for row, later in pairs]
    usual = float(np.median(seconds))
    calm = [(later["tokens"], own) for (_, later), own in zip(pairs, seconds, strict=True) if own <= LONG * usual]
    base, token = fit([[1.0, float(tokens)] for tokens, _ in calm], [own for _, own in calm])
    return base, token


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
