"""Rows of ``rollouts/*.parquet``, one per rollout, and of ``evaluations/*.parquet``, one per held-out answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.records.write.whole_files import write_table
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import OBSERVED, Rollout

TURN = pa.struct(
    [
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("generator_id", pa.string()),
        ("tools", pa.list_(pa.string())),
        ("seconds", pa.float64()),
        ("failures", pa.int64()),
        ("reward", pa.float64()),
    ]
)
FORK = pa.struct([("start", pa.int64()), ("follows", pa.int64())])
ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("policy_versions", pa.list_(pa.int64())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("consumed_at_version", pa.list_(pa.int64())),
        ("staleness", pa.int64()),
        ("state", pa.string()),
        ("drop_reason", pa.string()),
        ("generator_id", pa.string()),
        ("admitted_at", pa.float64()),
        ("generated_at", pa.float64()),
        ("scored_at", pa.float64()),
        ("consumed_at", pa.float64()),
        ("epoch", pa.int64()),
        ("extra", pa.string()),
        ("turns", pa.list_(TURN)),
        ("episode_reward", pa.float64()),
        ("prompt_length", pa.int64()),
        ("forks", pa.list_(FORK)),
    ]
)
ROLLOUTS_FOLDER = "rollouts"
# Columns that grow with the answers' lengths, and that no guarantee depends on: old parts may lose them.
BULKY = ("prompt", "response", "behavior_logprobs", "extra")
EVALUATIONS_FOLDER = "evaluations"
ANSWER_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("set", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),
        ("tokens", pa.int64()),
    ]
)


@dataclass(slots=True)
class RolloutRow:
    """One trained, dropped or failed rollout, as ``rollouts/*.parquet`` holds it; None for stages that it did not
    reach.

    ``consumed_at_version`` has one entry per use, ``staleness`` is that of the last use (None if never used), times are
    seconds of the run's clock and ``consumed_at`` is the last use's. ``epoch``: the run's epoch when the rollout was
    given to its generator; with ``policy_versions`` it identifies the weights that sampled each token. ``extra``: the
    arguments of ``log_extra``, as a JSON object. ``turns``: those of an episode, in which the observed tokens have
    version -1 and log-prob 0. ``forks``: where its row forks, in positions of the prompt's ``prompt_length`` tokens and
    those of the response after them.
    """

    rollout_id: int
    group_id: int
    prompt: str
    state: str
    admitted_at: float
    response: str | None = None
    reward: float | None = None
    policy_versions: Any = ()  # [L] integers, a list or an array
    behavior_logprobs: Any = ()  # [L]
    consumed_at_version: tuple[int, ...] = field(default=())
    staleness: int | None = None
    drop_reason: str | None = None
    generator_id: str | None = None
    generated_at: float | None = None
    scored_at: float | None = None
    consumed_at: float | None = None
    epoch: int = 0
    extra: str | None = None
    turns: tuple[Turn, ...] = ()
    episode_reward: float | None = None
    prompt_length: int | None = None
    forks: tuple[Fork, ...] = ()

    def fill(self, rollout: Rollout) -> None:
        """Copy text and arrays from the finished rollout."""
        self.prompt, self.response = rollout.prompt.text, rollout.response_text
        self.policy_versions, self.behavior_logprobs = rollout.policy_versions, rollout.behavior_logprobs
        self.turns, self.episode_reward = rollout.turns, rollout.episode_reward
        self.prompt_length, self.forks = len(rollout.prompt.token_ids), rollout.forks


def write_part(target: Path, rows: Sequence[RolloutRow], rollouts: Sequence[Rollout | None] | None = None) -> None:
    """Write one Parquet file of the rows, each with text and arrays of its rollout if it has one."""
    for row, rollout in zip(rows, rollouts or (), strict=rollouts is not None):
        if rollout is not None:
            row.fill(rollout)
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in ROLLOUT_SCHEMA.names}
    columns["turns"] = [[_told(turn) for turn in row.turns] for row in rows]
    columns["forks"] = [[vars(fork) for fork in row.forks] for row in rows]
    write_table(target, columns, ROLLOUT_SCHEMA)


def _told(turn: Turn) -> dict[str, Any]:
    """Its fields. A model may call a tool by halves of characters, which Parquet cannot hold."""
    return {**vars(turn), "tools": [name.encode(errors="replace").decode() for name in turn.tools]}


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """Columns of one file. Those of episodes are null if the file was written before there were any."""
    missing = {"turns", "episode_reward", "prompt_length", "forks"} - set(pq.read_schema(path).names)
    table = pq.read_table(path, columns=[name for name in names if name not in missing])
    for name in missing.intersection(names):
        table = table.append_column(
            ROLLOUT_SCHEMA.field(name), pa.nulls(table.num_rows, ROLLOUT_SCHEMA.field(name).type)
        )
    return table.select(names)


def undo_uses(target: Path, version: int, returned: Collection[int]) -> None:
    """Remove the uses at ``version`` and later from a file: the learner went back to it. A row without another use
    becomes that of a dropped rollout; rows of rollouts that ``returned`` to the buffer are removed."""
    rows = [row for row in pq.read_table(target).to_pylist() if row["rollout_id"] not in returned]
    for row in rows:
        used = row["consumed_at_version"] or []
        kept = [at for at in used if at < version]
        if len(kept) == len(used):
            continue
        row |= {"consumed_at_version": kept, "consumed_at": None, "staleness": None}
        if kept:
            sampled = [at for at in row["policy_versions"] if at != OBSERVED]
            row["staleness"] = kept[-1] - min(sampled, default=kept[-1])
        else:
            row |= {"state": "dropped", "drop_reason": "rolled_back"}
    write_table(target, {name: [row.get(name) for row in rows] for name in ROLLOUT_SCHEMA.names}, ROLLOUT_SCHEMA)


def write_answers(run_dir: Path, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
    """Write one row per answer to ``evaluations/step-N.parquet``. An evaluation that a resumed run repeats replaces its
    file. ``set`` is empty for the task's own held-out prompts."""
    folder = run_dir / EVALUATIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: [{"step": step, **answer}.get(name) for answer in answers] for name in ANSWER_SCHEMA.names}
    write_table(folder / f"step-{step:08d}.parquet", columns, ANSWER_SCHEMA)
