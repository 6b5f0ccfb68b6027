"""Digests of the local files that settings name, by which a resumed run notices that data or a model was replaced."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.checkpoint_folder import resolve
from asyncrlhf.errors import ConfigError

SAMPLES, SAMPLE_BYTES = 32, 2**20  # of a larger file
NOTHING = Path(".nothing")
NOT_READ = (".md", ".lock", ".log")  # beside a model or data


def digests(config: RunConfig) -> dict[str, str]:
    """By setting, for those that name local files, data or code; hub names and missing files are left out.

    Of a large file its size and 32 samples of 1 MiB are read, spread evenly.
    """
    found: dict[str, str] = {}
    for key, path in _named(config):
        try:
            if path.exists():
                found[key] = _digest(path)
        except (OSError, ValueError):  # the code that uses it reports the error
            continue
    return found


def _named(config: RunConfig) -> Iterator[tuple[str, Path]]:
    yield "model.path", _model(config.model.path)
    if config.task.kind == "prompts":
        yield "task.path", Path(config.task.path or NOTHING).expanduser()
        for name, entry in (config.task.mixture if isinstance(config.task.mixture, Mapping) else {}).items():
            yield f"task.mixture.{name}.path", Path(str(entry.get("path", NOTHING))).expanduser()
    if config.reward.kind == "model":
        yield "reward.model.path", _model(config.reward.model.path)
    if config.reward.kind == "judge":
        yield "reward.judge.model", _model(config.reward.judge.model)
    yield "reward.target", _source(config.reward.target)
    yield "algorithm.loss.target", _source(config.algorithm.loss.target)


def _model(path: str) -> Path:
    try:
        return Path(resolve(path))
    except ConfigError:  # the code that loads it reports the error
        return NOTHING


def _source(target: str) -> Path:
    """The file of ``package.module:name``, which was imported when the settings were checked."""
    module = sys.modules.get(target.partition(":")[0])
    return Path(getattr(module, "__file__", None) or NOTHING)


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if not file.name.startswith(".") and file.suffix not in NOT_READ:
            whole.update(f"{file.name if path.is_dir() else ''}/{file.stat().st_size}/".encode())
            for sample in _samples(file):
                whole.update(sample)
    return whole.hexdigest()[:16]


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for place in range(SAMPLES):
            opened.seek(place * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
