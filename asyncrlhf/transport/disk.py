"""Transport through a shared file system: the sender writes safetensors files, receivers read them when complete.

The learner and its replicas need no network but the one for the tickets. When a group forms, every receiver writes an
answer into the folder, which shows whether all see the same one. A version's folder holds
``model-00001-of-0000N.safetensors``, one file per bucket, ``model.safetensors.index.json`` as transformers writes it,
and ``manifest.json`` with the checksums. With ``weights.delta`` a bucket may instead be ``base-00001-...``, as it was
in an earlier version, with what changed since in ``patch-*.bin``: all of these files are links to those of the version
before. A folder is written under another name and then renamed, so that it appears complete or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams, as_bytes, copy_tensors, entries_by_bucket
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.transport.sparse import Chain, Head, Link, joined, next_parts
from asyncrlhf.types import TensorEntry, WeightManifest

MANIFEST, INDEX, ANSWERS, LOCK = "manifest.json", "model.safetensors.index.json", "receivers", "in-use.lock"
WRITING = ".writing-"
_OURS = re.compile(r"(\.writing-)?v\d{8,}-[0-9a-f]{8}")


def folder_name(version: int) -> str:
    """A folder name unique to this write: a version may be written twice."""
    return f"v{version:08d}-{uuid.uuid4().hex[:8]}"


def answer_file(root: Path, receiver: str) -> Path:
    return root / ANSWERS / f"{quote(receiver, safe='')}.json"


def bucket_file(bucket: int, buckets: int, patched: bool = False) -> str:
    """``patched``: the file lacks what later patches changed."""
    return f"{'base' if patched else 'model'}-{bucket + 1:05d}-of-{buckets:05d}.safetensors"


def take_over(root: Path) -> IO[str]:
    """Claim ``root`` for this sender: no other sender may write there, and files of a crashed one are removed. The
    returned file holds the claim until it is closed.

    Raises WeightSyncError when the folder cannot be written or belongs to a live run.
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
        pass  # a file system without locks: the folder is not checked
    for left in root.iterdir():
        if _OURS.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    for left in (root / ANSWERS).glob("*.json*"):
        left.unlink(missing_ok=True)
    return claim


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file completely or not at all, so that readers never see half a file."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content, or None without such a file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


def described(manifest: WeightManifest) -> list[list[Any]]:
    """The description of a version's tensors in ``manifest.json``."""
    return [[e.name, list(e.shape), e.dtype, e.bucket] for e in manifest.tensors]


def missing_parts(folder: Path, buckets: int) -> str:
    """What an incomplete version still lacks, as half a sentence."""
    draft = folder.with_name(f"{WRITING}{folder.name}")
    if draft.is_dir():
        written = len(list(draft.glob("*.safetensors")))
        return f"{written} of {buckets} buckets are written and {MANIFEST} is missing"
    if not folder.parent.is_dir():
        return f"{folder.parent} does not exist on this machine (is weights.disk_path on a shared file system?)"
    return f"the folder {folder.name} is missing"


def read_bucket(folder: Path, name: str, entries: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
    """One bucket's tensors by name, mapped from its file rather than copied.

    Raises WeightSyncError naming the file when it is missing, damaged, or holds other tensors.
    """
    path = folder / name
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {entry.name: file.get_tensor(entry.name) for entry in entries}
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error
    for entry in entries:
        found = tensors[entry.name]
        if (tuple(found.shape), found.dtype) != (entry.shape, getattr(torch, entry.dtype)):
            raise WeightSyncError(f"{path} holds {entry.name!r} as {found.dtype}{list(found.shape)}.")
    return tensors


def read_part(path: Path, start: int, size: int) -> torch.Tensor:
    """Bytes of a file: uint8 [size]. Raises WeightSyncError naming the file when it is missing or too short."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            found = bytearray(file.read(size))
    except OSError as error:
        raise WeightSyncError(f"{path} cannot be read: {error}.") from error
    if len(found) < size:
        raise WeightSyncError(f"{path} ends before byte {start + size}: it is damaged.")
    return torch.frombuffer(found, dtype=torch.uint8)


POLL_SECONDS = 0.01
T = TypeVar("T")


def wait_for(look: Callable[[], T | None], seconds: float) -> T | None:
    """Call ``look`` until it returns a value, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


class DiskSender(WeightSender):
    """Writes its snapshot in ``transfer``, during the learner's next step; receivers read it when it is complete.

    Its folder holds the newest version, the previous one while a receiver may still read it, and the receivers'
    answers.
    """

    def __init__(
        self, manifest: WeightManifest, root: Path, *, timeout_seconds: float, wire: Wire | None = None,
        sharded: ShardedParams | None = None,
    ) -> None:  # fmt: skip
        super().__init__(manifest, wire=wire, sharded=sharded)
        self._root = root
        self._timeout_seconds = timeout_seconds
        self._newest: Path | None = None  # the newest complete version, and
        self._chains: list[Chain] = []  # the parts of its buckets, by the names of their files
        self._claim: IO[str] | None = None
        self._receivers: list[str] = []
        self._name = ""  # of the snapshot's folder, once a ticket was made

    def listen(self, host: str = "") -> str:
        self._claim = take_over(self._root)
        return str(self._root)

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Wait until each receiver has written its answer."""
        if self._claim is None:
            raise WeightSyncError("The weight sender is not listening: call listen before connect.")
        absent = set(receivers)

        def look() -> bool | None:
            absent.difference_update([name for name in absent if self._answer(name).get("epoch") == epoch])
            return None if absent else True

        wait_for(look, self._timeout_seconds)
        if absent:
            reason = f"left no answer in {self._root / ANSWERS} within {self._timeout_seconds:g} s"
            lost = {name: reason for name in receivers if name in absent}
            raise LostReceiversError(f"The weight group of epoch {epoch} could not form", lost)
        self._receivers = list(receivers)
        super().connect(endpoint, receivers, epoch)
        with self.lock:
            self._chains = []  # whole buckets again: a receiver may be gone because a part of a chain is damaged

    def _prepare(self) -> None:
        self._name = ""

    def _refs(self, version: int) -> tuple[str]:
        self._name = self._name or folder_name(version)
        return (self._name,)

    def _send(self, ticket: Ticket) -> int:
        """What has not changed is links to files of the newest version. Raises WeightSyncError when the disk fails."""
        if self._newest is not None and self._newest.name == self._name:
            return 0
        self._sweep()
        final, draft = self._root / self._name, self._root / f"{WRITING}{self._name}"
        views, count = self.buckets.views(), len(self.manifest.bucket_bytes)
        try:
            draft.mkdir()
            older = self._chains if self.wire.sparse and self._newest is not None else []
            parts = next_parts(older, self.checksums, self.patches, self.manifest.bucket_bytes)
            payloads, starts = joined(parts)
            added = f"patch-{self._name}.bin"
            if len(payloads):
                (draft / added).write_bytes(as_bytes(payloads).data)
            chains: list[Chain] = []
            for bucket, entries in enumerate(entries_by_bucket(self.manifest)):
                patch, end = parts.get(bucket), self.checksums[bucket] if self.checksums else 0
                kept = older[bucket] if older and (bucket not in parts or patch is not None) else ()
                if patch is not None:
                    kept = (*kept, Link(end, added, patch.head, starts[bucket]))
                own = bucket_file(bucket, count, patched=len(kept) > 1)
                if not kept or not self._take_same(draft, kept, own):
                    own, parts[bucket] = bucket_file(bucket, count), None
                    save_file({e.name: views[e.name].cpu() for e in entries}, draft / own, metadata={"format": "pt"})
                    kept = (Link(end, own),)
                chains.append((kept[0]._replace(where=own), *kept[1:]))
            if all(len(chain) == 1 for chain in chains):
                files = {e.name: bucket_file(e.bucket, count) for e in self.manifest.tensors}
                index = {"metadata": {"total_size": self.manifest.total_bytes}, "weight_map": files}
                (draft / INDEX).write_text(json.dumps(index))
            facts = {"version": ticket.version, "checksums": self.checksums, "tensors": described(self.manifest)}
            (draft / MANIFEST).write_text(json.dumps(facts | {"buckets": count, "parts": chains}))
            os.rename(draft, final)  # the name by which receivers know that it is complete
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"Version {ticket.version} cannot be written to {self._root}: {error}.") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._newest, self._chains = final, chains
        return self.payload(parts)

    def _take_same(self, draft: Path, chain: Chain, own: str) -> bool:
        """Link the files of ``chain`` that the newest version has, the first one as ``own``; returns False if the file
        system has no links."""
        assert self._newest is not None
        with suppress(OSError):
            os.link(self._newest / chain[0].where, draft / own)
            for link in chain[1:]:
                if not (draft / link.where).exists():
                    os.link(self._newest / link.where, draft / link.where)
            return True
        (draft / own).unlink(missing_ok=True)
        return False

    def _sweep(self) -> None:
        """Remove the versions before the newest when every receiver of the group has the newest."""
        if self._newest is None or any(self._answer(n).get("folder") != self._newest.name for n in self._receivers):
            return
        for folder in self._root.glob("v*-*"):
            if folder != self._newest and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()
        self._claim = None

    def _answer(self, name: str) -> dict[str, object]:
        return read_json(answer_file(self._root, name)) or {}


class DiskReceiver(WeightReceiver):
    """Writes an answer under its name into the sender's folder when it joins a group and when it has a version."""

    _root: Path | None = None

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        super().connect(endpoint, rank, world_size, epoch, name)
        self._root = Path(endpoint)
        self._answer(None)

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        weights = super().receive(ticket)
        self._answer(ticket.refs[0])
        return weights

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        (folder, chains), entries = self._folder(ticket), entries_by_bucket(ticket.manifest)
        views = staging.views()

        def whole(bucket: int, link: Link) -> None:
            tensors = read_bucket(folder, link.where, entries[bucket])
            copy_tensors({name: views[name] for name in tensors}, tensors)

        def payload(link: Link, head: Head) -> torch.Tensor:
            return read_part(folder / link.where, link.start, head.nbytes)

        for bucket in wanted:
            self._staged.follow(ticket, bucket, chains[bucket], partial(whole, bucket), payload)
            self._staged.verify(ticket, bucket)

    def _folder(self, ticket: Ticket) -> tuple[Path, list[Chain]]:
        """The folder of the ticket's version, when complete, and the parts of its buckets. Raises WeightSyncError
        naming what is missing or does not fit."""
        if self._root is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        if ticket.epoch != self._epoch:
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the receiver is of epoch "
                f"{self._epoch}."
            )
        folder = self._root / ticket.refs[0]
        facts = wait_for(lambda: read_json(folder / MANIFEST), self._timeout_seconds)
        if facts is None:
            raise WeightSyncError(
                f"Version {ticket.version} is not complete in {self._root} after {self._timeout_seconds:g} s: "
                f"{missing_parts(folder, len(ticket.manifest.bucket_bytes))}."
            )
        if (facts["version"], facts["tensors"]) != (ticket.version, described(ticket.manifest)):
            raise WeightSyncError(f"The manifest of the ticket for version {ticket.version} is not that of {folder}.")
        return folder, [
            tuple(Link(end, where, Head(*head) if head else None, start) for end, where, head, start in chain)
            for chain in facts["parts"]
        ]

    def _answer(self, folder: str | None) -> None:
        assert self._root is not None
        try:
            write_json(answer_file(self._root, self._staged.name), {"epoch": self._epoch, "folder": folder})
        except OSError as error:
            raise WeightSyncError(
                f"{self._staged.name} cannot write to {self._root / ANSWERS}: {error}; weights.disk_path must be the "
                f"same folder on all machines."
            ) from error
