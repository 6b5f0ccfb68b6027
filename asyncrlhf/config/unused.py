"""Given settings that a run does not read, because another setting chose a different kind. They are reported at the
start, not refused, so that ``generator.engine`` of an experiment can be changed without clearing the old engine's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import replica_kinds


def unused_settings(config: RunConfig) -> list[str]:
    """One sentence for each group of settings that differ from their defaults without effect. Names, no values: some
    are secrets."""
    engines = {kind.config.engine for kind in replica_kinds(config.generator)}
    reward = {config.reward.kind} if config.reward.kind != "sum" else {"model", "judge", "http", "python"}
    judged = "judge" in reward and config.reward.judge.engine == "http"
    of_agents = ("agent_sampling", "endpoint_host")
    adaptive = ("ess_floor", "min_staleness")
    found = [
        ("generator.vllm", config.generator.vllm, (), "vllm" in engines, "generator.engine=vllm"),
        ("generator.fake", config.generator.fake, (), "fake" in engines, "generator.engine=fake"),
        ("reward", config.reward, ("target",), "python" in reward, "reward.kind=python"),
        ("reward.model", config.reward.model, (), "model" in reward, "reward.kind=model"),
        ("reward.judge", config.reward.judge, (), "judge" in reward, "reward.kind=judge"),
        ("reward.http", config.reward.http, (), "http" in reward or judged, "reward.kind=http"),
        ("async", config.async_, adaptive, config.async_.adaptive, "async.adaptive=true"),
        ("episode", config.episode, of_agents, config.episode.agents, "episode.agent"),
        ("task", config.task, ("path",), config.task.kind in ("prompts", "environment"), "task=prompts"),
    ]
    return [
        f"Not used: {', '.join(changed)}; needs {needed}."
        for where, settings, names, used, needed in found
        if not used and (changed := list(_changed(where, settings, names)))
    ]


def _changed(where: str, settings: Any, names: tuple[str, ...]) -> Iterator[str]:
    for declared in fields(settings):
        value = getattr(settings, declared.name)
        default = declared.default if declared.default_factory is MISSING else declared.default_factory()
        if names and declared.name not in names:
            continue
        if is_dataclass(value):
            yield from _changed(f"{where}.{declared.name}", value, ())
        elif value != default:
            yield f"{where}.{declared.name}"
