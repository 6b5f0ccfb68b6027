"""Every setting says what it means, and what help, reference and schema call allowed is what a config accepts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.cli.reference import schema as print_schema
from asyncrlhf.cli.reference import settings_page
from asyncrlhf.cli.settings_help import listed_sections, settings_help
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import conf_folder, to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.settings_list import ENTRY, Setting, common_settings, every_setting, json_schema, sections
from asyncrlhf.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
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
UNCHECKED_ALONE = ("generator.groups.NAME", "reference.teachers.NAME", "reward.http", "reward.parts.NAME")


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


MOST = 320  # settings whose name a user does not choose, 16 of them of episodes: a new one first makes room


def test_there_are_no_more_settings_than_a_house_can_hold() -> None:
    assert sum(ENTRY not in s.key for s in every_setting()) <= MOST


def uses_of_settings() -> dict[str, str]:
    """The text of all that a person wrote beside the package: presets, experiments, pages and tests, by file."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    for folder, ends in (("conf", ("yaml",)), ("experiments", ("py", "md", "yaml", "sh")), ("tests", ("py",))):
        found += [path for end in ends for path in (ROOT / folder).rglob(f"*.{end}")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def is_named(key: str, file: str, text: str) -> bool:
    """Whether a text names the setting: with its group, as a line of its preset, or in a test as a keyword."""
    group, _, name = key.rpartition(".")
    if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text):
        return True
    if file.startswith("conf/"):
        part = group.partition(".")[0]
        own = file.startswith(f"conf/{part}/") or re.search(rf"^{part}:", text, re.M)
        return bool(own and re.search(rf"^\s*{name}:", text, re.M))
    return file.endswith(".py") and bool(re.search(rf"""\b{name}(=|["']:)""", text))


def test_a_recipe_an_experiment_a_page_or_a_test_names_each_setting() -> None:
    """What is never changed is a constant beside its use. The page made by ``make reference`` does not count."""
    texts = uses_of_settings()
    keys = [setting.key for setting in every_setting() if ENTRY not in setting.key]
    assert [key for key in keys if not any(is_named(key, file, text) for file, text in texts.items())] == []


def test_the_help_of_train_begins_with_the_common_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    common = common_settings()
    assert 20 <= len(common) <= 30
    for setting in common:
        assert f"  {setting.key}={setting.written}  ({setting.allowed})\n" in text
    assert " ".join(common[0].about.split()) in " ".join(text.split())
    groups = re.findall(r"^  (\w+) +(\d+)  \S", text[text.index("All settings are in these groups") :], re.M)
    listed = [setting for section in listed_sections() for setting in section.settings]
    assert sum(int(number) for _, number in groups) == len(listed) and "learner.optim=" not in text
    for name, number in groups:
        assert main(["train", "--help", name]) == 0
        shown = capsys.readouterr().out
        own = [s for s in listed if (s.key.partition(".")[0] if "." in s.key else "run") == name]
        assert len(own) == int(number)
        assert all(f"  {s.key}={s.written}  ({s.allowed})\n" in shown for s in own)


def test_the_reference_page_begins_with_the_common_settings() -> None:
    page = settings_page()
    first = page[page.index("## Common settings") : page.index("## The run")]
    assert re.findall(r"^\| `([\w.]+)` \|", first, re.M) == [setting.key for setting in common_settings()]


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
