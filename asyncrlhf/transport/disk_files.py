"""Versions of the weights as folders of safetensors files, written whole or not at all, with a manifest each.

A version's folder holds ``model-00001-of-0000N.safetensors``, one file a bucket, ``model.safetensors.index.json`` as
transformers writes it, and ``manifest.json`` with the checksums. It is written under another name and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import TensorEntry, WeightManifest

MANIFEST, INDEX, ANSWERS, LOCK = "manifest.json", "model.safetensors.index.json", "receivers", "in-use.lock"
WRITING = ".writing-"
_OURS = re.compile(r"(\.writing-)?v\d{8,}-[0-9a-f]{8}")


def folder_name(version: int) -> str:
    """A name that no other write has: a version may be written twice."""
    return f"v{version:08d}-{uuid.uuid4().hex[:8]}"


def answer_file(root: Path, receiver: str) -> Path:
    return root / ANSWERS / f"{quote(receiver, safe='')}.json"


def bucket_file(bucket: int, buckets: int) -> str:
    return f"model-{bucket + 1:05d}-of-{buckets:05d}.safetensors"


def take_over(root: Path) -> IO[str]:
    """Make ``root`` this sender's: no other sender writes there, and what a crashed one left is removed. The returned
    file holds the claim until it is closed.

    Raises WeightSyncError when the folder cannot be written or belongs to a run that lives.
    """
    try:
        (root / ANSWERS).mkdir(parents=True, exist_ok=True)
        claim = (root / LOCK).open("w")
    except OSError as error:
        raise WeightSyncError(f"weights.disk_path={root} cannot be written: {error}.") from error
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        claim.close()
        raise WeightSyncError(f"weights.disk_path={root} is in use by another run; give each run its own.") from None
    except OSError:
        pass  # a file system without locks: the folder is taken on trust
    for left in root.iterdir():
        if _OURS.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    for left in (root / ANSWERS).glob("*.json*"):
        left.unlink(missing_ok=True)
    return claim


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: readers never see half a file."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None when there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


class VersionWriter:
    """Writes one version: ``begin``, ``add`` each bucket, ``publish``. A writer that never gets there leaves a
    folder under a temporary name, which ``take_over`` or ``discard`` removes.
    """

    def __init__(self, root: Path, name: str, manifest: WeightManifest) -> None:
        self._final = root / name
        self._draft = root / f"{WRITING}{name}"
        self._manifest = manifest

    def begin(self) -> None:
        self._draft.mkdir()

    def add(self, bucket: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: contiguous ones on the host; they are written without another copy."""
        save_file(dict(tensors), self._path(bucket), metadata={"format": "pt"})

    def add_same(self, bucket: int, older: Path) -> bool:
        """Take over the unchanged file of an older version, without writing its bytes where the file system allows."""
        try:
            os.link(older / self._path(bucket).name, self._path(bucket))
        except OSError:
            return False
        return True

    def publish(self, version: int, checksums: Sequence[int]) -> Path:
        """The folder gets its name, by which receivers know that it is complete."""
        count = len(self._manifest.bucket_bytes)
        files = {e.name: bucket_file(e.bucket, count) for e in self._manifest.tensors}
        index = {"metadata": {"total_size": self._manifest.total_bytes}, "weight_map": files}
        (self._draft / INDEX).write_text(json.dumps(index))
        tensors = [[e.name, list(e.shape), e.dtype, e.bucket] for e in self._manifest.tensors]
        facts = {"version": version, "checksums": list(checksums), "buckets": count, "tensors": tensors}
        (self._draft / MANIFEST).write_text(json.dumps(facts))
        os.rename(self._draft, self._final)
        return self._final

    def discard(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    def _path(self, bucket: int) -> Path:
        return self._draft / bucket_file(bucket, len(self._manifest.bucket_bytes))


def missing_parts(folder: Path, buckets: int) -> str:
    """What a version that is not there yet still lacks, as half a sentence."""
    draft = folder.with_name(f"{WRITING}{folder.name}")
    if draft.is_dir():
        written = len(list(draft.glob("*.safetensors")))
        return f"{written} of {buckets} buckets are written and {MANIFEST} is missing"
    if not folder.parent.is_dir():
        return f"{folder.parent} does not exist on this machine (is weights.disk_path on a shared file system?)"
    return f"the folder {folder.name} is missing"


@contextlib.contextmanager
def read_bucket(folder: Path, bucket: int, entries: Sequence[TensorEntry], buckets: int) -> Iterator[dict[str, Any]]:
    """One bucket's tensors by name, mapped from its file rather than copied, as long as the context lasts.

    Raises WeightSyncError naming the file when it is missing, damaged, or holds other tensors.
    """
    path = folder / bucket_file(bucket, buckets)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {entry.name: file.get_tensor(entry.name) for entry in entries}
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error
    for entry in entries:
        found = tensors[entry.name]
        if (tuple(found.shape), found.dtype) != (entry.shape, getattr(torch, entry.dtype)):
            raise WeightSyncError(f"{path} holds {entry.name!r} as {found.dtype}{list(found.shape)}.")
    yield tensors
