"""Digests of the local files that settings name, by which a resumed run notices that data or a model was replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.source_files import source_files
from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import PICKLED

SAMPLES, SAMPLE_BYTES = 32, 2**20  # of a larger file
NOTHING = Path(".nothing")
NOT_READ = (".md", ".lock", ".log")  # beside a model or data


def digests(config: RunConfig) -> dict[str, str]:
    """By setting, for those that name local files, data or code; hub names and missing files are left out.

    Of a large file its size and 32 samples of 1 MiB are read, spread evenly.
    """
    found: dict[str, list[str]] = {}
    for key, path in named_files(config):
        if digest := digest_of(path):
            found.setdefault(key, []).append(digest)
    return {key: of[0] if len(of) == 1 else _short("/".join(of).encode()) for key, of in found.items()}


def named_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """The settings that may name local files, data or code, with their paths, which may not exist. Code has a path for
    its file and one for each module beside it that it imports, directly or not."""
    yield "model.path", _model(config.model.path)
    if config.task.kind in ("prompts", "environment"):
        yield "task.path", Path(config.task.path or NOTHING).expanduser()
        yield from _code("task.path", config.task.path)
        for name, entry in (config.task.mixture if isinstance(config.task.mixture, Mapping) else {}).items():
            yield f"task.mixture.{name}.path", Path(str(entry.get("path", NOTHING))).expanduser()
    if config.reward.kind == "model":
        yield "reward.model.path", _model(config.reward.model.path)
    if config.reward.kind == "judge":
        yield "reward.judge.model", _model(config.reward.judge.model)
    for name, part in config.reward.sources.items():
        key = config.reward.key(name)
        yield from _code(key if config.reward.reward_funcs else f"{key}.target", part.target)
    yield from _code("algorithm.loss.target", config.algorithm.loss.target)
    yield from _code("learner.optim", config.learner.optim)
    for key, target in config.episode.code:
        yield from _code(key, target)
    for sink in config.logging.active_sinks:
        yield from _code("logging.sinks", sink)


def _model(path: str) -> Path:
    from asyncrlhf.models.checkpoint_folder import named  # imports transformers, which takes seconds

    try:
        return Path(named(path))
    except ConfigError:  # the code that loads it reports the error
        return NOTHING


def _code(key: str, target: str) -> Iterator[tuple[str, Path]]:
    if target.startswith(PICKLED):
        yield key, Path(target.removeprefix(PICKLED))
    elif ":" in target:
        for path in source_files(target.partition(":")[0]):
            yield key, path


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


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for place in range(SAMPLES):
            opened.seek(place * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
