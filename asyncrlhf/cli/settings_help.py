"""The ``--help`` of settings: all of them by group, one group, one setting, or those that contain a word."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from asyncrlhf.config.settings_list import ENTRY, Section, Setting, every_setting, sections
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import did_you_mean

USAGE = """asyncrlhf train [overrides]: one run, or with -m a Hydra multirun

  asyncrlhf train steps=50 async.max_staleness=4     settings are key=value; errors are reported before the start
  asyncrlhf train algorithm=tis async=one_step       a preset of a group is group=NAME
  asyncrlhf train -m seed=0,1,2                      every combination, one after the other (see asyncrlhf sweep --help)
  asyncrlhf train --cfg job [overrides]              shows the config and starts nothing
  asyncrlhf train --config-dir FOLDER [overrides]    adds presets of your own, FOLDER/GROUP/NAME.yaml

  asyncrlhf train --help async                       one group; --help async.lag one setting; --help WORD a search
  docs/reference/settings.md has the same list, `asyncrlhf schema` the schema for editors."""


def settings_help(words: Sequence[str]) -> str:
    """Text for the terminal. Raises ConfigError for a word that no setting contains."""
    width = min(120, max(60, shutil.get_terminal_size((100, 20)).columns))
    if not words:
        return "\n\n".join([USAGE, *(_section(section, width) for section in _listed())])
    return "\n\n".join(_found(word.partition("=")[0], width) for word in words)


def _listed() -> list[Section]:
    """All settings but those of groups inside an entry, which repeat the group that their line names."""
    return [section for section in sections() if f".{ENTRY}." not in section.key and section.settings]


def _found(word: str, width: int) -> str:
    groups = [s for s in _listed() if s.key == word or (word and s.key.startswith(f"{word}."))]
    if groups:
        return "\n\n".join(_section(group, width) for group in groups)
    settings = [s for section in _listed() for s in section.settings]
    found = [s for s in settings if s.key == word] or [
        s for s in settings if word.lower() in s.key or word.lower() in s.about.lower()
    ]
    if not found:
        keys = [s.key for s in every_setting()]
        hint = did_you_mean(word, [*keys, *(section.key for section in sections()), *(k.split(".")[-1] for k in keys)])
        raise ConfigError(f"{word} matches no setting{hint}; asyncrlhf train --help lists them all.")
    return "\n".join(_lines(found, width))


def _section(section: Section, width: int) -> str:
    title = f"{section.key or 'asyncrlhf train'}: {section.about}"
    presets = [f"{section.key}=" + " | ".join(section.presets)] if section.presets else []
    wrapped = [line for text in presets for line in textwrap.wrap(text, width - 2, subsequent_indent="    ")]
    return "\n".join([title, *(f"  {line}" for line in wrapped), *_lines(section.settings, width)])


def _lines(settings: Iterable[Setting], width: int) -> list[str]:
    lines = []
    for setting in settings:
        lines.append(f"  {setting.key}={setting.written}  ({setting.allowed})")
        lines += textwrap.wrap(setting.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines
