"""Resolves ``generator.replicas`` and ``generator.groups`` into kinds of replicas, each with a config of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.engines.generator_config import GeneratorConfig, GroupConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, overlay

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_INHERITED = ("engine", "slots", "threads", "gpus", "virtual_step_seconds")


@dataclass(frozen=True)
class Kind:
    """Replicas that are alike. ``config`` is what each of them gets: its ``replicas`` is their number at the start,
    and it has no groups."""

    prefix: str
    config: GeneratorConfig

    def replica(self, number: int) -> str:
        """The name of the ``number``-th replica, from 0: ``generator-0``, or ``generator-fast-0`` in group ``fast``."""
        return f"{self.prefix}-{number}"


def replica_kinds(config: GeneratorConfig) -> list[Kind]:
    """The kinds in the order given; raises ConfigError with one sentence for what cannot be read as groups."""
    number = config.replicas
    check(
        isinstance(number, int) and not isinstance(number, bool) and number >= 1,
        f"generator.replicas={number} is no whole number from 1 on; replicas of several kinds are set by name, such as "
        "generator.groups={fast:{replicas:2},slow:{slots:16}}.",
    )
    if config.groups is None:
        return [Kind("generator", _sized(config, number, config.max_replicas, "generator"))]
    check(number == 1, f"generator.replicas={number} says nothing beside generator.groups; set it in each group.")
    groups = _from_mapping(config.groups)
    check(
        config.max_replicas == 0,
        f"generator.max_replicas={config.max_replicas} says nothing beside groups; set it in each group.",
    )
    return [Kind(f"generator-{name}", _resolve(config, name, group)) for name, group in groups.items()]


def _from_mapping(named: Any) -> dict[str, GroupConfig]:
    check(
        isinstance(named, Mapping) and named and all(isinstance(entry, Mapping) for entry in named.values()),
        f"generator.groups={named} are no groups by name; allowed: null, or such as "
        "{fast:{replicas:2},slow:{slots:16}}.",
    )
    return {str(name): overlay(GroupConfig(), entry, f"generator.groups.{name}") for name, entry in named.items()}


def _resolve(config: GeneratorConfig, name: str, group: GroupConfig) -> GeneratorConfig:
    where = f"generator.groups.{name}"
    check(_NAME.fullmatch(name), f"{where}: a group's name has letters, digits and underscores, and a letter first.")
    changes = {key: value for key in _INHERITED if (value := getattr(group, key)) is not None}
    fake = overlay(config.fake, group.fake, f"{where}.fake")
    vllm = overlay(config.vllm, group.vllm, f"{where}.vllm")
    try:
        merged = dataclasses.replace(config, replicas=1, groups=None, fake=fake, vllm=vllm, **changes)
    except ConfigError as error:
        raise ConfigError(f"In {where}: {error}") from None
    return _sized(merged, group.replicas, group.max_replicas, where)


def _sized(config: GeneratorConfig, replicas: int, most: int, where: str) -> GeneratorConfig:
    check(replicas >= 1, f"{where}.replicas={replicas} is out of range; allowed: >= 1.")
    check(
        most == 0 or most >= replicas,
        f"{where}.max_replicas={most} is less than {where}.replicas={replicas}; "
        f"allowed: 0 (no more than at the start) or >= {replicas}.",
    )
    return dataclasses.replace(config, replicas=replicas, max_replicas=most)
