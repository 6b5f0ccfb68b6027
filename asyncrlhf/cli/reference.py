"""Reference pages made from the code: docs/reference/settings.md, metrics.md and the schema that editors read.

``python -m asyncrlhf.cli.reference docs/reference`` (``make reference``) writes them; ``tests/test_reference.py``
checks the committed ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrlhf.config.settings_list import ENTRY, Section, Setting, common_settings, json_schema, sections
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.metric_names import FAMILIES
from asyncrlhf.validation import did_you_mean

SCHEMA_HELP = """asyncrlhf schema [GROUP]: JSON schema of config files, for editors

  asyncrlhf schema > settings.schema.json      of whole configs, such as conf/experiment/NAME.yaml
  asyncrlhf schema async > async.schema.json   of one group's presets, such as conf/async/NAME.yaml

An editor with the YAML language server checks and completes a file that begins with
  # yaml-language-server: $schema=settings.schema.json"""


def schema(arguments: Sequence[str]) -> int:
    """``asyncrlhf schema``: print the JSON schema."""
    if {"-h", "--help"} & set(arguments):
        print(SCHEMA_HELP)
        return 0
    keys = [section.key for section in sections() if section.key and ENTRY not in section.key]
    key = arguments[0] if arguments else ""
    if len(arguments) > 1 or (key and key not in keys):
        hint = did_you_mean(key, keys)
        raise ConfigError(f"{' '.join(arguments)} is not a group of settings{hint}; allowed: {', '.join(keys)}.")
    print(json.dumps(json_schema(key), indent=1))
    return 0


def settings_page() -> str:
    """docs/reference/settings.md."""
    shown = [section for section in sections() if f".{ENTRY}." not in section.key and section.settings]
    parts = [
        "# Settings\n\nMade from the code by `make reference`; `asyncrlhf train --help` shows the common ones and the "
        "groups. `asyncrlhf schema` prints a schema with which an editor checks and completes config files.\n\n"
        "On the command line a setting is `key=value`, and a preset of a group `group=NAME`."
    ]
    lines = ["## Common settings", "", "Those that are changed most.", "", *_table(common_settings())]
    return "\n\n".join([*parts, "\n".join(lines), *(_section(section) for section in shown)]) + "\n"


def _section(section: Section) -> str:
    lines = [f"## {section.key or 'The run'}", "", section.about]
    if section.presets:
        lines += ["", f"Presets: {', '.join(f'`{section.key}={name}`' for name in section.presets)}."]
    return "\n".join([*lines, "", *_table(section.settings)])


def _table(settings: Iterable[Setting]) -> list[str]:
    rows = [_row(f"`{s.key}`", f"`{s.written}`", s.allowed, s.about) for s in settings]
    return ["| setting | default | allowed | meaning |", "|---|---|---|---|", *rows]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    parts = [
        "# Metrics\n\nEvery key that a line of `metrics.jsonl` may have: one line a learner step. Made from the code "
        "by `make reference`. A figure that a step does not have is missing or null; angle brackets hold what differs."
    ]
    for family in FAMILIES:
        rows = [_row(f"`{metric.name}`", metric.unit, metric.about) for metric in family.metrics]
        parts.append(
            "\n".join([f"## {family.title}", "", family.about, "", "| key | unit | meaning |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


PAGES = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main()
