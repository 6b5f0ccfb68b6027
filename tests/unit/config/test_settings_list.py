"""Every setting says what it means, and what help, reference and schema call allowed is what a config accepts."""

from __future__ import annotations

import math
from typing import Any

import jsonschema
import pytest
import yaml

from asyncrlhf.cli.reference import schema as print_schema
from asyncrlhf.cli.settings_help import settings_help
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import conf_folder, to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.settings_list import Setting, every_setting, json_schema, sections
from asyncrlhf.errors import ConfigError

SECTIONS = {section.key: section for section in sections()}


def test_every_setting_has_a_description() -> None:
    unsaid = [s.key for s in every_setting() if not s.about.endswith((".", "?")) or len(s.about) < 12]
    assert unsaid == [], "declare these by validation.setting(default, 'One sentence.')"
    assert [key for key, section in SECTIONS.items() if not section.about] == []


def test_shown_defaults_are_those_of_the_command_line() -> None:
    """No preset that is chosen by default changes one."""
    assert to_plain(load_config([])) == to_plain(RunConfig())


def refusal(setting: Setting, value: Any) -> str:
    """What a config says to one wrong value of a setting."""
    group, _, name = setting.key.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        built = SECTIONS[group].schema(**{"async_" if name == "async" else name: value})
        built.check(group)  # of those that are looked at where they are in use
    return str(caught.value)


def outside(setting: Setting) -> list[float]:
    bounds = setting.bounds
    found = []
    for side, step in (("low", -1), ("high", 1)):
        if side in bounds:
            found += [bounds[side] + step] + ([bounds[side]] if bounds.get(f"exclusive_{side}") else [])
    if setting.kind == "integer":
        found += [10**12]
    if setting.kind == "number":
        found += [1e30, -1e30, math.inf, math.nan]
    return found


# Named by what they stand in, and checked where that is read.
UNCHECKED_ALONE = ("generator.groups.NAME", "reward.http", "reward.parts.NAME")


def test_absurd_values_and_those_out_of_the_shown_range_are_refused() -> None:
    for setting in every_setting():
        if setting.key.startswith(UNCHECKED_ALONE):
            continue
        for value in outside(setting):
            said = refusal(setting, value)
            assert setting.key.rpartition(".")[2] in said and "allowed" in said, (setting.key, said)


def test_words_that_are_no_shown_choice_are_refused() -> None:
    for setting in every_setting():
        if setting.choices and not setting.key.startswith(UNCHECKED_ALONE):
            said = refusal(setting, ["nonsense"] if setting.kind == "array" else "nonsense")
            assert "nonsense is not known" in said and all(choice in said for choice in setting.choices), said


def test_help_has_every_setting_with_default_and_meaning() -> None:
    text = settings_help([])
    for setting in every_setting():
        if ".NAME." not in setting.key.replace(".NAME.", ".", 1):
            assert f"  {setting.key}={setting.written}  ({setting.allowed})\n" in text or "parts.NAME" in setting.key
    assert "Most learner steps by which a trained rollout's oldest token may lag behind" in " ".join(text.split())


def test_help_finds_by_word_and_refuses_what_is_nowhere() -> None:
    assert "generator.min_p" in settings_help(["share of the largest probability"])
    assert settings_help(["async.lag=3"]).startswith("  async.lag=null  (a whole number >= 0 or null)")
    with pytest.raises(ConfigError, match=r"max_stale_ness matches no setting \(did you mean .*max_staleness"):
        settings_help(["max_stale_ness"])


def test_the_schema_takes_our_own_presets_and_refuses_what_a_config_refuses() -> None:
    for file in conf_folder().glob("*/*.yaml"):
        group = file.parent.name
        document = yaml.safe_load(file.read_text()) or {}
        key = "" if "@package _global_" in file.read_text() else group
        shape = json_schema(key)
        shape["properties"]["defaults"] = {"type": "array"}
        jsonschema.validate(document, shape)
    for wrong in ({"steps": 0}, {"async": {"mode": "asink"}}, {"learner": {"learning_rat": 1.0}}, {"seed": "a"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json_schema())
    jsonschema.validate({"seed": "${now:}", "generator": {"groups": {"fast": {"replicas": 2}}}}, json_schema())


def test_schema_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asyncs is not a group of settings \(did you mean async\?\)"):
        print_schema(["asyncs"])


def test_bounds_are_numbers() -> None:
    assert all(math.isfinite(value) for s in every_setting() for value in s.bounds.values())
