"""The settings of a recorded run, as they could be given again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from asyncrlhf.buffer.async_config import SETTABLE
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import CONFIG_FILE
from asyncrlhf.validation import check


def recorded_settings(named: str, run: Path) -> dict[str, Any]:
    """The settings of the run's config.yaml, as they could be given again; raises ConfigError, naming the run by
    ``named``, for a folder that holds none."""
    path = run / CONFIG_FILE
    check(path.is_file(), f"{named} holds no {CONFIG_FILE}; give the directory of a run.")
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{named} has a {CONFIG_FILE} that cannot be read: {error}.") from error
    whole = isinstance(saved, dict) and isinstance(saved.get("async"), dict)
    check(whole, f"{named} has a {CONFIG_FILE} without settings of a run; give the directory of a run.")
    mode = saved["async"].get("mode")  # its own bound and lag stand in the file, and may not be given again
    given = {key: value if SETTABLE.get(key, mode) == mode else None for key, value in saved["async"].items()}
    return {**saved, "async": given}
