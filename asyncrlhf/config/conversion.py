"""Between Hydra's config, the typed :class:`RunConfig` and plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.sentences import omegaconf_sentence, unknown_key
from asyncrlhf.errors import ConfigError
from asyncrlhf.redaction import learn_secrets, redacted
from asyncrlhf.validation import editable


@cache
def register_schema() -> None:
    """Give Hydra the typed defaults, once; ``conf/config.yaml`` starts from them."""
    schema = _schema()
    node = {_yaml_name(f.name): schema[f.name] for f in fields(RunConfig)}
    node["name"] = "${task.kind}"  # what RunConfig makes of an empty name; Hydra puts it into a multirun's folder
    ConfigStore.instance().store(name="schema", node=node)


@cache
def _schema() -> DictConfig:
    """The typed defaults, to be copied and not changed (building them takes a quarter of composing a config)."""
    return editable(OmegaConf.structured(RunConfig))


def _yaml_name(name: str) -> str:
    return name.removesuffix("_")  # of ``async_``


def from_hydra(config: DictConfig) -> RunConfig:
    """Convert Hydra's config to the frozen dataclasses; raises ConfigError with one sentence."""
    known = {_yaml_name(f.name) for f in fields(RunConfig)}
    unknown = [str(key) for key in config if str(key) not in known]
    if unknown:
        raise ConfigError(unknown_key(unknown[0], to_plain(RunConfig())))
    learn_secrets(config)
    try:
        raw = {"async_" if key == "async" else str(key): config[key] for key in config}
        typed = {name: node for name, node in raw.items() if _is_typed(node)}
        if len(typed) + len(_plain_schema()) < len(fields(RunConfig)):  # as read from a run's config.yaml
            built = OmegaConf.to_object(OmegaConf.merge(_schema(), raw))
            assert isinstance(built, RunConfig)
            return built
        # Hydra has given the sections their types, and copying those would take four times as long.
        rest: Any = OmegaConf.merge(_plain_schema(), {name: node for name, node in raw.items() if name not in typed})
        sections: dict[str, Any] = {name: OmegaConf.to_object(node) for name, node in typed.items()}
        return RunConfig(**sections, **{str(name): rest[name] for name in rest})
    except OmegaConfBaseException as error:
        raise ConfigError(omegaconf_sentence(error, to_plain(RunConfig()))) from error


def _is_typed(node: Any) -> bool:
    return isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node))


@cache
def _plain_schema() -> DictConfig:
    """The typed defaults of the settings that belong to no section."""
    types = get_type_hints(RunConfig)
    plain = [f for f in fields(RunConfig) if not is_dataclass(types[f.name])]
    alone = [(f.name, types[f.name], field(default=f.default)) for f in plain]
    return editable(OmegaConf.structured(make_dataclass("PlainSettings", alone)))


def to_plain(config: RunConfig, *, whole: bool = False) -> dict[str, Any]:
    """The resolved config as YAML-able dictionaries under the users' names; ``whole``: with its secrets."""
    plain = _values(config)
    plain["async_"] |= config.async_.in_force
    named = {_yaml_name(str(key)): value for key, value in plain.items()}
    return named if whole else redacted(named)


def _values(part: Any) -> Any:
    """``part`` as dictionaries, lists and values: OmegaConf does the same a hundred times slower."""
    if is_dataclass(part):
        return {f.name: _values(getattr(part, f.name)) for f in fields(part)}
    if isinstance(part, Mapping):
        return {key: _values(value) for key, value in part.items()}
    return [_values(item) for item in part] if isinstance(part, list | tuple) else part


def conf_folder() -> Path:
    """The packaged ``conf/`` of an installed wheel, else the repository's."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
