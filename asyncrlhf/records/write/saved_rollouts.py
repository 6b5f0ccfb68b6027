"""The finished rollouts of a checkpoint as one Arrow file: one row per rollout, bit-exact, without code (no pickle)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrlhf.buffer.ledger import prompt_from_json, prompt_to_json
from asyncrlhf.errors import CheckpointError
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import Rollout

ARRAYS = {
    "response_ids": pa.int64(), "behavior_logprobs": pa.float32(), "policy_versions": pa.int64(),
    "ref_logprobs": pa.float32(), "values": pa.float32(), "kept_ids": pa.int32(), "kept_counts": pa.int32(),
    "routed_experts": pa.uint16(),  # [P+L-1, E] flat
}  # fmt: skip
FACTS = (
    "rollout_id", "group_id", "finish_reason", "response_text", "generator_id", "critic_version", "tag", "turns",
    "episode_reward", "forks",
)  # fmt: skip
# Texts are stored as JSON, whose escapes can hold what UTF-8 cannot; siblings share one entry for their prompt.
SCHEMA = pa.schema(
    [
        pa.field("facts", pa.string(), nullable=False),
        pa.field("prompt", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        *(pa.field(name, pa.large_list(kind)) for name, kind in ARRAYS.items()),
    ]
)


def write_rollouts(target: Path, rollouts: Sequence[Rollout]) -> None:
    """Write one Arrow IPC file, in the order of ``rollouts``. Their prompts' metadata must be JSON-able."""
    columns = {
        "facts": pa.array([json.dumps(_facts(r)) for r in rollouts], pa.string()),
        "prompt": pa.array([json.dumps(prompt_to_json(r.prompt)) for r in rollouts], pa.string()).dictionary_encode(),
        **{name: pa.array([_cast(getattr(r, name), kind) for r in rollouts], pa.large_list(kind))
           for name, kind in ARRAYS.items()},
    }  # fmt: skip
    with target.open("wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))


def read_rollouts(path: Path) -> dict[int, Rollout]:
    """The rollouts by id. Raises CheckpointError for any other file."""
    try:
        with path.open("rb") as file:
            table = pa.ipc.open_file(file).read_all()
        if table.schema != SCHEMA:
            raise ValueError("its columns are not those of rollouts")
        table = table.combine_chunks()
        table.validate(full=True)
        rollouts = _rollouts(table) if len(table) else []
    except (OSError, ValueError, TypeError, KeyError, RecursionError, pa.ArrowException) as error:
        raise CheckpointError(f"the rollouts of the checkpoint in {path} cannot be read: {error}.") from error
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    if len(by_id) < len(rollouts):
        raise CheckpointError(f"{path} holds a rollout twice.")
    return by_id


def _rollouts(table: pa.Table) -> list[Rollout]:
    places = table["prompt"].chunk(0)
    prompts = [prompt_from_json(json.loads(text)) for text in places.dictionary.to_pylist()]
    arrays = {name: [_array(value) for value in table[name].chunk(0)] for name in ARRAYS}
    rollouts = []
    for i, (text, place) in enumerate(zip(table["facts"].to_pylist(), places.indices.to_pylist(), strict=True)):
        facts: dict[str, Any] = json.loads(text)
        if isinstance(facts, dict):
            facts.setdefault("forks", [])  # which older files lack
        if set(facts) != set(FACTS) or not all(type(facts[name]) is int for name in ("rollout_id", "group_id")):
            raise ValueError(f"row {i} is not a rollout")
        facts["turns"] = tuple(Turn(**{**turn, "tools": tuple(turn["tools"])}) for turn in facts["turns"])
        facts["forks"] = tuple(Fork(**fork) for fork in facts["forks"])
        own = {name: column[i] for name, column in arrays.items()}
        if (routes := own["routed_experts"]) is not None:
            inputs = len(prompts[place].token_ids) + len(own["response_ids"]) - 1
            narrow = np.uint8 if routes.max(initial=0) < 256 else np.uint16
            own["routed_experts"] = routes.reshape(inputs, -1).astype(narrow)
        rollouts.append(Rollout(prompt=prompts[place], **facts, **own))
    return rollouts


def _facts(rollout: Rollout) -> dict[str, Any]:
    facts = {name: getattr(rollout, name) for name in FACTS}
    return facts | {name: [vars(one) for one in facts[name]] for name in ("turns", "forks")}


def _cast(array: np.ndarray | None, kind: pa.DataType) -> np.ndarray | None:
    return None if array is None else np.asarray(array, kind.to_pandas_dtype()).reshape(-1)


def _array(value: pa.LargeListScalar) -> Any:
    """A copy: the learner's batches are built of arrays that own their memory."""
    return np.array(value.values) if value.is_valid else None
