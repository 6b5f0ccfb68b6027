"""The ``--help`` of settings: the common ones and the groups; one group, one setting, or those that contain a word."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from asyncrlhf.config.settings_list import ENTRY, Section, Setting, common_settings, every_setting, sections
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import did_you_mean

RUN = "run"  # the name here of the group of settings without one
USAGE = """asyncrlhf train [overrides]: one run, or with -m a Hydra multirun

  asyncrlhf train steps=50 async.max_staleness=4     settings are key=value; errors are reported before the start
  asyncrlhf train algorithm=tis async=one_step       a preset of a group is group=NAME
  asyncrlhf train -m seed=0,1,2                      every combination, one after the other (see asyncrlhf sweep --help)
  asyncrlhf train --cfg job [overrides]              shows the config and starts nothing
  asyncrlhf train --config-dir FOLDER [overrides]    adds presets of your own, FOLDER/GROUP/NAME.yaml

  asyncrlhf train --help GROUP                       all settings of a group; --help KEY one; --help WORD a search
  docs/reference/settings.md has all of them, `asyncrlhf schema` the schema for editors."""


def settings_help(words: Sequence[str]) -> str:
    """Text for the terminal. Raises ConfigError for a word that no setting contains."""
    width = min(120, max(60, shutil.get_terminal_size((100, 20)).columns))
    if not words:
        return "\n\n".join([USAGE, _common(width), _groups()])
    return "\n\n".join(_found(word.partition("=")[0], width) for word in words)


def listed_sections() -> list[Section]:
    """All settings but those of groups inside an entry, which repeat the group that their line names."""
    return [section for section in sections() if f".{ENTRY}." not in section.key and section.settings]


def _common(width: int) -> str:
    presets = [line for s in sections() if s.key in ("algorithm", "async") for line in _presets(s, width)]
    return "\n".join(["The settings that are changed most:", *presets, *_lines(common_settings(), width)])


def _groups() -> str:
    """The groups with the numbers of their settings, those of their subgroups included."""
    numbers = Counter(
        s.key.partition(".")[0] if "." in s.key else RUN for section in listed_sections() for s in section.settings
    )
    abouts = {section.key or RUN: section.about for section in sections()}
    rows = [f"  {name:13}{number:4}  {abouts[name]}" for name, number in numbers.items()]
    return "\n".join(["All settings are in these groups (asyncrlhf train --help GROUP):", *rows])


def _presets(section: Section, width: int) -> list[str]:
    text = f"{section.key}=" + " | ".join(section.presets) if section.presets else ""
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=" " * 6)


def _found(word: str, width: int) -> str:
    groups = [s for s in listed_sections() if (s.key or RUN) == word or (word and s.key.startswith(f"{word}."))]
    if groups:
        return "\n\n".join(_section(group, width) for group in groups)
    settings = [s for section in listed_sections() for s in section.settings]
    found = [s for s in settings if s.key == word] or [
        s for s in settings if word.lower() in s.key or word.lower() in s.about.lower()
    ]
    if not found:
        keys = [s.key for s in every_setting()]
        hint = did_you_mean(word, [*keys, *(section.key for section in sections()), *(k.split(".")[-1] for k in keys)])
        raise ConfigError(f"{word} matches no setting{hint}; asyncrlhf train --help lists the groups.")
    return "\n".join(_lines(found, width))


def _section(section: Section, width: int) -> str:
    title = f"{section.key or 'asyncrlhf train'}: {section.about}"
    return "\n".join([title, *_presets(section, width), *_lines(section.settings, width)])


def _lines(settings: Iterable[Setting], width: int) -> list[str]:
    lines = []
    for setting in settings:
        lines.append(f"  {setting.key}={setting.written}  ({setting.allowed})")
        lines += textwrap.wrap(setting.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines
