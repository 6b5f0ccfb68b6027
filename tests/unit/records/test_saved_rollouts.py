"""Rollouts in a checkpoint come back exact to the bit."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncrlhf.errors import CheckpointError
from asyncrlhf.records.write.saved_rollouts import SCHEMA, _facts, read_rollouts, write_rollouts
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import OBSERVED, Prompt, Rollout

PROMPT = Prompt(
    "p-1", "2+3=\ud800", np.array([2, 7, 1]), "5", {"level": 3, "tags": ["a", None]}, [{"role": "user", "content": "ü"}]
)
ODD = np.array([0x7FC00001, 0x80000000, 0xFF800000, 0x00000001], np.uint32).view(np.float32)  # NaN with a payload, -0
FIRST = Rollout(
    7, 3, PROMPT, np.array([1, 2, 3, 2**40]), ODD, np.array([0, 0, 1, 2]), "stop", "5\n\x00\udfff", "generator-0",
    ref_logprobs=ODD[::-1].copy(), values=ODD.copy(), critic_version=4,
    kept_ids=np.array([5, 6, 7], np.int32), kept_counts=np.array([1, 0, 2, 0], np.int32),
)  # fmt: skip
SECOND = replace(
    FIRST, rollout_id=8, ref_logprobs=None, values=None, critic_version=None, kept_ids=None, kept_counts=None
)
EPISODE = replace(
    SECOND, rollout_id=10, policy_versions=np.array([3, OBSERVED, 4, 4]), tag=6, episode_reward=0.1,
    turns=(Turn(0, 1, "g-0", ("search", "\ud800"), 0.1, 1, -0.3), Turn(2, 4, "g-1")), forks=(Fork(1, -1),),
)  # fmt: skip
EMPTY = Rollout(
    9, 4, Prompt("q", "", np.array([], np.int64)), np.array([], np.int64), np.array([], np.float32),
    np.array([], np.int64), "length",
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes() and bool(b.flags.writeable)
    return bool(a == b)


@pytest.mark.parametrize("given", [[FIRST, SECOND, EMPTY, EPISODE], [EMPTY], [SECOND], []], ids=len)
def test_they_come_back_exact_to_the_bit(tmp_path: Path, given: list[Rollout]) -> None:
    write_rollouts(tmp_path / "rollouts.arrow", given)
    back = read_rollouts(tmp_path / "rollouts.arrow")
    assert list(back) == [rollout.rollout_id for rollout in given]
    for one in given:
        other = back[one.rollout_id]
        for field in fields(Rollout):
            if field.name != "prompt":
                assert same(getattr(one, field.name), getattr(other, field.name)), field.name
        for field in fields(Prompt):
            assert same(getattr(one.prompt, field.name), getattr(other.prompt, field.name)), field.name
    if len(given) == 4:
        assert back[7].prompt is back[8].prompt, "siblings share their prompt"


@pytest.mark.parametrize(
    "change",
    [
        {"facts": ["[]"]},
        {"facts": ['{"rollout_id": "x"}']},
        {"facts": [json.dumps(_facts(EPISODE)).replace('"start"', '"begin"')]},
        {"prompt": ['{"prompt_id": 1}']},
        {"response_ids": [[1]]},
        {"kept_counts": [None]},
        {"response_ids": [None]},
    ],
    ids=str,
)
def test_a_file_of_other_contents_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "rollouts.arrow"
    write_rollouts(path, [FIRST])
    with path.open("rb") as file:
        table = pa.ipc.open_file(file).read_all()
    for name, values in change.items():
        kind = SCHEMA.field(name).type
        column = pa.array(values, pa.string()).dictionary_encode() if name == "prompt" else pa.array(values, kind)
        table = table.set_column(SCHEMA.names.index(name), SCHEMA.field(name), column)
    with path.open("wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_table(table)
    with pytest.raises(CheckpointError) as refusal:
        read_rollouts(path)
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)
    write_rollouts(path, [FIRST, FIRST])
    with pytest.raises(CheckpointError, match="holds a rollout twice"):
        read_rollouts(path)


def test_files_from_before_rows_forked_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "asyncrlhf.records.write.saved_rollouts._facts", lambda r: {k: v for k, v in _facts(r).items() if k != "forks"}
    )
    write_rollouts(tmp_path / "rollouts.arrow", [FIRST])
    assert read_rollouts(tmp_path / "rollouts.arrow")[7].forks == ()
