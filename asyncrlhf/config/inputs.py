"""Digests of the local files that settings name, by which a resumed run notices that data or a model was replaced."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError

SAMPLES, SAMPLE_BYTES = 32, 2**20  # of a larger file
NOTHING = Path(".nothing")
NOT_READ = (".md", ".lock", ".log")  # beside a model or data


def digests(config: RunConfig) -> dict[str, str]:
    """By setting, for those that name local files, data or code; hub names and missing files are left out.

    Of a large file its size and 32 samples of 1 MiB are read, spread evenly.
    """
    return {key: digest for key, path in named_files(config) if (digest := digest_of(path))}


def named_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """The settings that may name local files, data or code, with their paths, which may not exist."""
    yield "model.path", _model(config.model.path)
    if config.task.kind == "prompts":
        yield "task.path", Path(config.task.path or NOTHING).expanduser()
        for name, entry in (config.task.mixture if isinstance(config.task.mixture, Mapping) else {}).items():
            yield f"task.mixture.{name}.path", Path(str(entry.get("path", NOTHING))).expanduser()
    if config.reward.kind == "model":
        yield "reward.model.path", _model(config.reward.model.path)
    if config.reward.kind == "judge":
        yield "reward.judge.model", _model(config.reward.judge.model)
    for name, part in config.reward.sources.items():
        key = config.reward.key(name)
        yield key if config.reward.reward_funcs else f"{key}.target", _source(part.target)
    yield "algorithm.loss.target", _source(config.algorithm.loss.target)


def _model(path: str) -> Path:
    from asyncrlhf.data.checkpoint_folder import resolve  # imports transformers, which takes seconds

    try:
        return Path(resolve(path))
    except ConfigError:  # the code that loads it reports the error
        return NOTHING


def _source(target: str) -> Path:
    """The file of ``package.module:name``, which was imported when the settings were checked."""
    module = sys.modules.get(target.partition(":")[0])
    return Path(getattr(module, "__file__", None) or NOTHING)


def digest_of(path: Path) -> str:
    """A digest of the file, or of all files below the folder; empty if it does not exist or cannot be read."""
    whole = hashlib.sha256()
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if not file.name.startswith(".") and file.suffix not in NOT_READ:
                name = file.relative_to(path).as_posix() if path.is_dir() else ""
                whole.update(f"{name}/{file.stat().st_size}/".encode())
                for sample in _samples(file):
                    whole.update(sample)
    except (OSError, ValueError):  # the code that uses it reports the error
        return ""
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
