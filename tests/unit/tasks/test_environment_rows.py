"""Prompts without a text, for environments that ask: seeds or rows, none of them in training and in evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.tasks.build_task import build_task
from tests.calling_model import calling_tokenizer


def test_without_rows_each_prompt_has_a_seed_of_its_own() -> None:
    task = build_task(TaskConfig(kind="environment", heldout_size=5), calling_tokenizer([]))
    first, again, other = task.train_source(0), task.train_source(0), task.train_source(1)
    seeds = [first.next().metadata["seed"] for _ in range(20)]
    assert seeds == [again.next().metadata["seed"] for _ in range(20)] and len({*seeds}) == 20
    held = [prompt.metadata["seed"] for prompt in task.heldout()]
    others = [other.next().metadata["seed"] for _ in range(20)]
    assert len(held) == 5 and not {*held} & {*seeds, *others} and not {*seeds} & {*others}
    assert task.heldout()[0].messages == [{"role": "user", "content": ""}]
    with pytest.raises(RewardError, match=r"have no rule; allowed: reward\.kind=environment"):
        task.reward(task.heldout()[0], "")


def test_rows_without_prompts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"environment": "a", "level": n}) + "\n" for n in range(25)))
    task = build_task(TaskConfig(kind="environment", path=str(file)), load_tokenizer(ModelConfig()))
    source = task.train_source(0)
    levels = [source.next().metadata["level"] for _ in range(22)]
    held = [prompt.metadata["level"] for prompt in task.heldout()]
    assert len(held) == 3 and sorted([*levels, *held]) == [*range(25)]
    assert all(len(prompt.token_ids) == 1 and prompt.text == "" for prompt in task.heldout()), "without a chat template"
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="holds 1 rows; at least two are needed"):
        build_task(TaskConfig(kind="environment", path=str(file)), load_tokenizer(ModelConfig()))
