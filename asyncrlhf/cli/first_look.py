"""Checks of a run's input before torch, transformers and Ray are imported, which takes seconds."""

from __future__ import annotations

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.data_config import refuse_missing_model
from asyncrlhf.plugins import load_function


def first_look(config: RunConfig) -> None:
    """Raise ConfigError for a path that does not exist, rows that cannot be read, a function that does not exist.

    ``orchestrator.run.prepare`` checks all of it again, and the rest.
    """
    check_model_path(config)
    for name, part in config.reward.sources.items():
        if part.kind == "python":
            funcs = config.reward.reward_funcs
            load_function("reward.reward_funcs" if funcs else f"{config.reward.key(name)}.target", part.target)
    if config.algorithm.loss.target:
        load_function("algorithm.loss.target", config.algorithm.loss.target)
    if config.task.kind == "prompts":
        from asyncrlhf.tasks.prompts import check_rows

        check_rows(config.task)


def check_model_path(config: RunConfig) -> None:
    """Raise ConfigError for a model path that looks like a folder but does not exist."""
    if config.model.path not in ("tiny", "smollm2"):
        refuse_missing_model(config.model.path)
