"""Builds the task that the config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import transformers

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.tasks.arithmetic import ArithmeticTask
from asyncrlhf.tasks.environment_rows import EnvironmentRows
from asyncrlhf.tasks.prompts import PromptsTask, build_prompts
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Prompt
from asyncrlhf.validation import check_package, overlay


def build_task(config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> Task:
    """The task of ``task.kind``; raises ConfigError for prompts that the run could not use."""
    return BUILDERS[config.kind](config, tokenizer)


def evaluation_prompts(config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts of data used only for evaluation: the first ``task.heldout_size`` of files and datasets."""
    if config.kind == "prompts" and config.mixture is None:
        return PromptsTask(config, tokenizer, trains=False).heldout()
    return build_task(config, tokenizer).heldout()


def evaluation_task(base: TaskConfig, given: Mapping[str, Any], key: str) -> TaskConfig:
    """The settings of one of ``evaluation.sets``: ``base`` with the differences ``given`` under ``key``."""
    if "path" in given:  # first, for a kind that needs one
        base = replace(base, kind="prompts", path=str(given["path"]), mixture=None, heldout_split="")
    return overlay(base, given, key)


def _reasoning(config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> Task:
    check_package("task.kind=reasoning_gym", "reasoning-gym", "reasoning")
    # reasoning-gym takes seconds to import, and the other tasks do not need it.
    from asyncrlhf.tasks.reasoning import ReasoningTask

    return ReasoningTask(config, tokenizer)


BUILDERS: dict[str, Callable[[TaskConfig, transformers.PreTrainedTokenizerBase], Task]] = {
    "arithmetic": ArithmeticTask,
    "prompts": build_prompts,
    "reasoning_gym": _reasoning,
    "environment": EnvironmentRows,
}
