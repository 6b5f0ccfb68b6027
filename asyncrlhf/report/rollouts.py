"""The report's rollout browser: a sample of trained rollouts, token by token, from ``rollout_tokens/*.parquet``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.records.write.recorder import ROLLOUTS_FOLDER
from asyncrlhf.records.write.rollout_rows import read_columns
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.report.load import Run
from asyncrlhf.types import OBSERVED

MAX_ROLLOUTS = 200  # of one run
MAX_BYTES = 4_000_000  # of all runs of a page
MAX_TOKENS = 2000  # of one rollout
_COLUMNS = [
    "step", "rollout_id", "reward", "prompt", "tokens", "policy_versions", "loss_mask", "importance_weight",
    "behavior_logprobs", "policy_logprobs",
]  # fmt: skip


def section(run: Run, max_bytes: int = MAX_BYTES) -> str:
    """One run's browser as self-contained HTML of at most ``max_bytes``; empty if the run has no recorded tokens."""
    files = [f for f in sorted((run.path / TOKENS_FOLDER).glob("steps-*.parquet")) if pq.read_metadata(f).num_rows]
    if not files:
        return ""
    page = (resources.files("asyncrlhf.report") / "rollouts.html").read_text(encoding="utf-8")
    chosen, recorded = _chosen(files, run.path / ROLLOUTS_FOLDER, max_bytes - len(page) - 200)
    # "<" is never in the page's source, so that no text of a rollout can end the script that holds it.
    data = json.dumps({"rollouts": chosen, "recorded": recorded}, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("{{ data }}", data)


def _chosen(files: list[Path], rows_folder: Path, max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """(rollouts for the page in the order of their steps, number of recorded ones). They are spread evenly over the
    run; fewer if the bytes do not suffice."""
    counts = [pq.read_metadata(file).num_rows for file in files]
    recorded, first = sum(counts), np.concatenate([[0], np.cumsum(counts)])
    wanted = np.unique(np.linspace(0, recorded - 1, min(MAX_ROLLOUTS, recorded)).round().astype(int))
    found: dict[int, dict[str, Any]] = {}
    for number, file in enumerate(files):
        here = wanted[(wanted >= first[number]) & (wanted < first[number + 1])] - first[number]
        if len(here):
            rows = pq.read_table(file, columns=_COLUMNS).take(pa.array(here)).to_pylist()
            found |= {int(first[number] + i): _compact(row) for i, row in zip(here, rows, strict=True)}
    _add_turns([row for row in found.values() if OBSERVED in row["v"]], rows_folder)
    order = np.random.default_rng(0).permutation(wanted)
    kept, room = [], max_bytes
    for index in order.tolist():
        # The page's own escape of "<" makes six bytes of one.
        text = json.dumps(found[index], separators=(",", ":"))
        size = len(text) + 5 * text.count("<") + 1
        if size <= room:
            kept.append(index)
            room -= size
    return [found[index] for index in sorted(kept)], recorded


def _compact(row: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout in the form of the page's script; long ones are cut."""
    shown = slice(0, MAX_TOKENS)
    versions, weights = row["policy_versions"], np.array(row["importance_weight"], np.float64)
    mask = np.array(row["loss_mask"], bool)

    def short(values: Sequence[float]) -> list[float | None]:
        pairs = zip(values[shown], versions[shown], strict=True)
        return [None if version == OBSERVED else _short(x) for x, version in pairs]

    return {
        "s": row["step"],
        "i": row["rollout_id"],
        "r": _short(row["reward"]),
        "a": row["step"] - 1 - min(version for version in versions if version != OBSERVED),
        "w": _short(weights[mask].mean()) if mask.any() else None,
        "p": row["prompt"],
        "t": row["tokens"][shown],
        "n": len(row["tokens"]),
        "v": versions[shown],
        "x": short(row["importance_weight"]),
        "b": short(row["behavior_logprobs"]),
        "c": short(row["policy_logprobs"]),
        "m": [i for i, trains in enumerate(row["loss_mask"][shown]) if not trains and versions[i] != OBSERVED],
    }


def _add_turns(episodes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Add to each episode its turns as ``rollouts/*.parquet`` has them, with the range of their versions, and where its
    branches begin: the token, and the one that it follows as a place in the response, negative in the prompt."""
    wanted = {row["i"]: row for row in episodes}
    for file in sorted(folder.glob("part-*.parquet")) if wanted else ():
        table = read_columns(file, ["rollout_id", "turns", "policy_versions", "prompt_length", "forks"])
        ours = [i for i, rollout_id in enumerate(table["rollout_id"].to_pylist()) if rollout_id in wanted]
        for given in table.take(pa.array(ours, pa.int64())).to_pylist():
            wanted[given["rollout_id"]]["f"] = [
                (fork["start"], None if fork["follows"] < 0 else fork["follows"] - given["prompt_length"])
                for fork in given["forks"] or ()
            ]
            wanted[given["rollout_id"]]["e"] = [
                {**turn, "v": [min(own), max(own)]}
                for turn in given["turns"] or ()
                if (own := given["policy_versions"][turn["start"] : turn["end"]])
            ]


def _short(value: float | None) -> float | None:
    """Three decimals; None for a value that is not a number."""
    return round(float(value), 3) if value is not None and np.isfinite(value) else None
