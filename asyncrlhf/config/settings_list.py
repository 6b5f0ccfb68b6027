"""The list of all settings from their dataclasses: key, type, default, allowed values, and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.validation import bounds_in_words

ENTRY = "NAME"  # placeholder in a key for the user's name of a mapping's entry
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array", dict: "object"}
_BOUNDS = {
    ("low", False): "minimum",
    ("low", True): "exclusiveMinimum",
    ("high", False): "maximum",
    ("high", True): "exclusiveMaximum",
}
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "settings by name",
}


@dataclass(frozen=True)
class Setting:
    """``kind``: JSON schema's name of the type; ``nullable``: null is allowed too. ``default`` is plain data;
    ``common``: a newcomer changes it."""

    key: str
    kind: str
    nullable: bool
    default: Any
    choices: tuple[str, ...]
    bounds: dict[str, Any]
    about: str
    common: bool

    @property
    def allowed(self) -> str:
        """Type and range, or the choices, in words."""
        if self.choices:
            listed = " | ".join(self.choices)
            return f"a list of {listed}" if self.kind == "array" else listed
        words = " and ".join([_WORDS[self.kind], *bounds_in_words(**self.bounds)]).replace(" and ", " ", 1)
        return f"{words} or null" if self.nullable else words

    @property
    def written(self) -> str:
        """The default as a user would write it, shortened if it is long."""
        text = self.default if isinstance(self.default, str) else json.dumps(self.default)
        line = text.splitlines()[0] if text else "''"
        return line if line == text or not text else f"{line[:40]}..."


@dataclass(frozen=True)
class Section:
    """A group of settings: ``key`` is empty for those of the run itself; ``presets`` are its files in ``conf/``."""

    key: str
    about: str
    presets: tuple[str, ...]
    settings: tuple[Setting, ...]
    schema: type


@cache
def sections() -> tuple[Section, ...]:
    """All groups in the order of the config, each before its subgroups; entries of a mapping as ``GROUP.NAME``."""
    return tuple(_sections(RunConfig, "", "The run itself."))


def every_setting() -> Iterator[Setting]:
    for section in sections():
        yield from section.settings


def common_settings() -> list[Setting]:
    """Those that a newcomer changes."""
    return [setting for setting in every_setting() if setting.common and ENTRY not in setting.key]


def _sections(schema: type, key: str, about: str) -> Iterator[Section]:
    hints = get_type_hints(schema)
    own = [f for f in fields(schema) if not is_dataclass(hints[f.name])]
    folder = conf_folder() / key
    presets = sorted(p.stem for p in folder.glob("*.yaml")) if key and folder.is_dir() else []
    yield Section(key, about, tuple(presets), tuple(_setting(f, hints[f.name], key) for f in own), schema)
    for inner in fields(schema):
        name = _join(key, inner.name.removesuffix("_"))
        entries = inner.metadata.get("entries")
        if is_dataclass(hints[inner.name]):
            yield from _sections(hints[inner.name], name, inner.metadata.get("about", ""))
        elif entries is not None:
            yield from _sections(entries, f"{name}.{ENTRY}", f"An entry of {name}; {ENTRY} is yours to choose.")


def _setting(declared: Field[Any], hint: Any, group: str) -> Setting:
    factory: Any = declared.default_factory
    default = declared.default if factory is MISSING else factory()
    types = [kind for kind in get_args(hint) or (hint,) if kind in _KINDS]
    origin = getattr(hint, "__origin__", None)
    found = origin or (types[0] if types else type(default) if default is not None else dict)
    told = declared.metadata
    return Setting(
        key=_join(group, declared.name),
        kind=_KINDS[found],
        nullable=default is None or type(None) in get_args(hint),
        default=default,
        choices=told.get("choices", ()),
        bounds=told.get("bounds", {}),
        about=told.get("about", ""),
        common=told.get("common", False),
    )


def _join(group: str, name: str) -> str:
    return f"{group}.{name}" if group else name


def json_schema(key: str = "") -> dict[str, Any]:
    """JSON schema of a config file: of a whole one, such as ``conf/experiment/NAME.yaml``, or of the group ``key``."""
    by_key = {section.key: section for section in sections()}
    schema = _object(by_key, key)
    if not key:
        schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"asyncrlhf {key}".strip(), **schema}


def _object(by_key: dict[str, Section], key: str) -> dict[str, Any]:
    section = by_key[key]
    properties = {s.key.rpartition(".")[2]: _property(by_key, s) for s in section.settings}
    depth = len(key.split(".")) if key else 0
    for inner in by_key:
        parts = inner.split(".")
        if inner and len(parts) == depth + 1 and parts[-1] != ENTRY and (not key or inner.startswith(f"{key}.")):
            properties[parts[-1]] = _object(by_key, inner)
    return {"type": "object", "description": section.about, "properties": properties, "additionalProperties": False}


def _property(by_key: dict[str, Section], setting: Setting) -> dict[str, Any]:
    told = {"description": setting.about, "default": setting.default}
    value: dict[str, Any] = {"type": setting.kind}
    if setting.choices:
        value |= {"items": {"enum": list(setting.choices)}} if setting.kind == "array" else {"enum": [*setting.choices]}
    for side in ("low", "high"):
        if side in setting.bounds:
            strict = f"exclusive_{side}" in setting.bounds
            value[_BOUNDS[side, strict]] = setting.bounds[side]
    entry = f"{setting.key}.{ENTRY}"
    if entry in by_key:
        value["additionalProperties"] = {"anyOf": [_object(by_key, entry), {"type": "null"}]}
    also = [{"type": "null"}] if setting.nullable else []
    # An interpolation; and 1e-4, which is a number to Hydra, but a text to YAML before 1.2.
    written = r"^\$\{|^-?[0-9.]+e-?[0-9]+$" if setting.kind == "number" else r"^\$\{"
    return {**told, "anyOf": [value, *also, {"type": "string", "pattern": written}]}
