"""``manifest.json`` of a checkpoint: size and hash of every file, written last and compared before anything is read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrlhf.errors import CheckpointError

MANIFEST = "manifest.json"
HASHERS = 8  # files that are hashed at a time

# By each file's path within the checkpoint: {"bytes": its size, "sha256": its hash in hex}.
Seals = dict[str, dict[str, Any]]


def seal(folder: Path, files: Iterable[Path]) -> Seals:
    """Write ``files`` to disk; returns their seals, by their paths within ``folder``."""
    return {file.relative_to(folder).as_posix(): _seal(file) for file in files}


class LinesSeal:
    """The seal of the first lines of a file to which a run appends. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines, self._bytes, self._hash = 0, 0, hashlib.sha256()  # so far

    def of(self, lines: int) -> dict[str, Any]:
        """Size and hash of the first ``lines`` lines, which are never fewer than in the call before. Reads only the new
        ones; raises CheckpointError if the file has fewer."""
        with self._path.open("rb") as file:
            file.seek(self._bytes)
            for line in islice(file, lines - self._lines):
                self._lines, self._bytes = self._lines + 1, self._bytes + len(line)
                self._hash.update(line)
        if self._lines < lines:
            raise CheckpointError(f"{self._path} has {self._lines} lines, and the run wrote {lines}.")
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def write_manifest(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Seal every file of ``folder`` that has no seal among ``known``, and write the manifest. Raises CheckpointError
    if a sealed file is missing or has another size."""
    found = _plain_files(folder)
    gone = sorted(name for name, facts in known.items() if found.get(name) != facts["bytes"])
    if gone:
        raise CheckpointError(f"the checkpoint {folder} lost {gone[0]} while it was written.")
    seals = {**known, **seal(folder, (folder / name for name in sorted(found.keys() - known.keys())))}
    path = folder / MANIFEST
    path.write_text(json.dumps({"files": seals}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    fsync(path)


def check_manifest(folder: Path) -> None:
    """Raise CheckpointError, in one sentence, unless ``folder`` holds exactly the files of its manifest, unchanged.

    Opens only plain files inside ``folder``. A hash detects errors of a disk or a copy; it does
    not protect against someone who writes another manifest, so the readers must not trust the files either.
    """
    found = _plain_files(folder)
    if found.pop(MANIFEST, None) is None:
        raise CheckpointError(f"the checkpoint {folder} has no {MANIFEST}, which is written last: it is incomplete.")
    seals = _read(folder / MANIFEST)
    missing, extra = sorted(seals.keys() - found.keys()), sorted(found.keys() - seals.keys())
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"holds {extra[0]!r}, which does not belong to it"
        raise CheckpointError(f"the checkpoint {folder} {what} (by its {MANIFEST}).")
    for name, said in damages(folder, seals):
        raise CheckpointError(f"the checkpoint {folder} is damaged: {name} {said}.")


def damages(folder: Path, seals: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The sealed files of ``folder`` that are missing or have changed, each with the end of a sentence about it. Files
    are hashed only if all have their sizes, several at a time."""
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="checkpoint-hash") as pool:
        for damage in (_other_size, _other_content):
            found = pool.map(damage, (folder / name for name in seals), seals.values())
            if said := [(name, what) for name, what in zip(seals, found, strict=True) if what]:
                return said
    return []


def _other_size(file: Path, facts: Mapping[str, Any]) -> str:
    try:
        found = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not stat.S_ISREG(found.st_mode):
        return "is not a plain file"
    size, written = found.st_size, facts.get("bytes")
    return "" if size == written else f"has {size} bytes, and {written!r} were written"


def _other_content(file: Path, facts: Mapping[str, Any]) -> str:
    try:
        return "" if _hash(file) == facts.get("sha256") else "has changed since it was written"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises CheckpointError for anything else, including excessive nesting."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error) or type(error).__name__}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return value


def fsync(path: Path) -> None:
    """Bring a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> Seals:
    seals = read_json(path).get("files")
    if not isinstance(seals, dict) or not all(isinstance(facts, dict) for facts in seals.values()):
        raise CheckpointError(f"{path} lists no files.")
    return seals


def _seal(file: Path) -> dict[str, Any]:
    fsync(file)
    return {"bytes": file.stat().st_size, "sha256": _hash(file)}


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _plain_files(folder: Path) -> dict[str, int]:
    """The size of each file below ``folder``, by its path within; raises CheckpointError for a link and for anything
    else that is not a plain file."""
    found = {}

    def fail(error: OSError) -> None:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}.") from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in (*folders, *files)):
            facts, name = path.lstat(), path.relative_to(folder).as_posix()
            if stat.S_ISREG(facts.st_mode):
                found[name] = facts.st_size
            elif not stat.S_ISDIR(facts.st_mode):
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not a plain file.")
    return found
