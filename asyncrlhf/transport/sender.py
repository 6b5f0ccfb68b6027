"""The common part of all senders: the learner's weights in flat buckets, their checksums, their ticket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import (
    FlatBuckets,
    GatheredBuckets,
    ShardedParams,
    entries_by_bucket,
    manifest_checksums,
)
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.sparse import Faster, Patch, changed_words, changes_by_layer, pack, word_size
from asyncrlhf.types import TensorEntry, WeightManifest


@dataclass(frozen=True)
class Wire:
    """The form of weights in transfers. ``cast``: the dtype of floating tensors (None: unchanged), with which the
    manifest was built. ``delta``: of ``weights.delta``; all but ``none`` need ``checksum``. ``relay``: receivers
    pass buckets on to each other."""

    cast: torch.dtype | None = None
    checksum: bool = True
    delta: str = "none"
    relay: bool = False

    @property
    def sparse(self) -> bool:
        """Whether patches may be sent."""
        return self.delta != "none"


class WeightSender:
    """The learner's sender. It holds one version at a time, which a thread copies into flat buckets; ``lock``
    guards the copy.

    The training thread calls ``begin_snapshot`` and ``fence``; between them it may read the parameters, as a forward
    and backward pass does, but not change them, so that the copy costs the learner almost no time. The checksums are
    computed after the fence. Another thread calls the other methods.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        device: torch.device | str = "cpu",
        wire: Wire | None = None,
        sharded: ShardedParams | None = None,
    ) -> None:
        """``device``: that of the copy. ``sharded``: weights to fetch when they are sent, in place of a copy."""
        self.manifest = manifest
        self.wire = wire or Wire()
        self.epoch = 0
        self.lock = threading.Lock()
        self.stall_seconds = 0.0
        self.version: int | None = None
        self.checksums: tuple[int, ...] = ()
        # With ``wire.sparse`` there are two sets of buckets, filled in turn: what the newest version is compared with.
        self._spare: FlatBuckets | None = None
        self._before: tuple[FlatBuckets, tuple[int, ...]] | None = None  # the version before, and its checksums
        self.patches: dict[int, Patch] = {}  # by bucket, from the version before to the newest
        self.changed: dict[str, tuple[int, int]] = {}  # by layer, as in ``TransferStats``
        self._faster = Faster(("sparse", "whole") if self.wire.delta == "auto" else ("sparse",))
        self._compare_seconds = 0.0
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="weight-snapshot")
        self._copy: Future[None] | None = None
        self._begun: list[Future[None]] = []
        self.buckets = FlatBuckets(manifest, device) if sharded is None else GatheredBuckets(sharded, manifest, device)

    def listen(self, host: str = "") -> str:
        """Open the rendezvous and return its endpoint, ``host:port``; empty if none is needed."""
        return ""

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Form the group of ``epoch`` with ``receivers`` (rank i+1 is ``receivers[i]``); drops the previous group.

        Blocks until all have called their own ``connect``. Raises LostReceiversError naming those that did not.
        """
        with self.lock:
            self.epoch = epoch

    def begin_snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy ``params`` as ``version``. They must not change before ``fence`` has returned."""
        self.fence()
        self.stall_seconds = 0.0
        if isinstance(params, ShardedParams):
            wait(self._begun)  # these still fetch the version before
            with self.lock:
                params.take()
            copy = self._copier.submit(self._take, version, params)
        else:
            # The current entries, independent of later changes of the mapping.
            self._copy = copy = self._copier.submit(self._take, version, dict(params))
        self._begun = [copy, self._copier.submit(self._complete)]

    def fence(self) -> float:
        """Wait until the copy no longer reads the parameters; call it before an optimizer step changes them.

        Returns the seconds waited, 0 if no copy was begun. Raises WeightSyncError naming a tensor that does not fit.
        """
        copy, self._copy = self._copy, None
        if copy is None:
            return 0.0
        started = time.perf_counter()
        try:
            copy.result()
        finally:
            self.stall_seconds = time.perf_counter() - started
        return self.stall_seconds

    def snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> float:
        """``begin_snapshot`` and ``fence``; returns the seconds that the caller waited."""
        self.begin_snapshot(version, params)
        return self.fence()

    def ticket(self) -> Ticket:
        """The ticket of the newest version, for every receiver."""
        with self._settled() as version:
            return Ticket(version, self.epoch, self.manifest, self._refs(version), self.checksums, self.wire.sparse)

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Send the version; blocks until every receiver of the group has it (``collective``), or until receivers can
        fetch it (``local``, ``object_store``, ``disk``: a receiver has it when its own call returns).

        Raises LostReceiversError naming the receivers that died, refused or did not answer within the time-out. The
        group is gone then: ``connect`` a new epoch with the survivors.
        """
        with self.lock:
            self._check_current(ticket)
            started = time.perf_counter()
            return self.measured(self._send(ticket), time.perf_counter() - started)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the newest version, for comparison."""
        with self._settled():
            return self.buckets.views()

    def close(self) -> None:
        """Close all connections and end a transfer in another thread."""

    def measured(self, sent_bytes: int, seconds: float) -> TransferStats:
        """The facts of a transfer, by which ``weights.delta=auto`` chooses."""
        if self._before is not None:  # else there was no choice
            self._faster.tell(seconds + self._compare_seconds)
        return TransferStats(seconds, sent_bytes, self.stall_seconds, self.changed)

    def outgoing(self, held: Sequence[int]) -> dict[int, Patch | None]:
        """What brings receivers whose buckets have the checksums ``held``, none if they have no buckets, to the present
        version: by bucket a patch, or None for the whole bucket. Without ``weights.delta`` all are whole."""
        if not self.wire.sparse or not held:
            return dict.fromkeys(range(len(self.manifest.bucket_bytes)))
        found: dict[int, Patch | None] = {}
        for bucket, (theirs, ours) in enumerate(zip(held, self.checksums, strict=True)):
            if theirs != ours:
                patch = self.patches.get(bucket)
                found[bucket] = patch if patch is not None and patch.head.base == theirs else None
        return found

    def payload(self, outgoing: Mapping[int, Patch | None]) -> int:
        """Bytes of what :meth:`outgoing` gives."""
        sizes = self.manifest.bucket_bytes
        return sum(sizes[bucket] if patch is None else patch.head.nbytes for bucket, patch in outgoing.items())

    @contextmanager
    def _settled(self) -> Iterator[int]:
        """The newest version, under the lock, when its copy is complete; raises the copy's error."""
        for last in self._begun[-1:]:  # the copy's own error is the fence's
            last.result()
        with self.lock:
            if self.version is None:
                raise WeightSyncError("There is no snapshot to publish: call begin_snapshot first.")
            yield self.version

    def _check_current(self, ticket: Ticket) -> None:
        """Raise WeightSyncError unless ``ticket`` belongs to the present snapshot and group."""
        if (ticket.version, ticket.epoch) != (self.version, self.epoch):
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender holds "
                f"version {self.version} of epoch {self.epoch}."
            )

    def _take(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        with self.lock:
            past = self._past() if self.wire.sparse else None
            self._before = None if past is None or self.version is None else (past, self.checksums)
            # Otherwise the old version would have half of the new weights if a tensor is refused.
            self.version, self.checksums, self.patches, self.changed = None, (), {}, {}
            self.copy_params(params)
            self.version = version

    def _complete(self) -> None:
        with self.lock:
            if self.version is None or not self.wire.checksum:
                return
            started = time.perf_counter()
            self.checksums = manifest_checksums(self.manifest, self.buckets.views())
            if self._before is not None and self._faster.pick() == "sparse":
                self._compare(*self._before)
            self._compare_seconds = time.perf_counter() - started

    def _compare(self, older: FlatBuckets, before: tuple[int, ...]) -> None:
        """Find the patches from the version ``before``, in ``older``, to the present one, and what changed by layer."""
        none = torch.zeros(0, dtype=torch.int64)

        def one(bucket: int, entries: Sequence[TensorEntry]) -> tuple[dict[str, tuple[int, int]], Patch | None]:
            word, base, differs = word_size(entries), before[bucket], before[bucket] != self.checksums[bucket]
            present = self.buckets.tensors[bucket] if differs else none
            places = changed_words(older.tensors[bucket], present, word) if differs else none
            return changes_by_layer(places, entries, word), pack(places, present, word, base) if differs else None

        every = entries_by_bucket(self.manifest)
        # Of fetched buckets only those of one thread exist.
        threads = 1 if isinstance(self.buckets, GatheredBuckets) else torch.get_num_threads()
        with ThreadPoolExecutor(threads, thread_name_prefix="weight-compare") as pool:
            for bucket, (counts, patch) in enumerate(pool.map(one, range(len(every)), every)):
                for layer, (changed, words) in counts.items():
                    others = self.changed.get(layer, (0, 0))
                    self.changed[layer] = others[0] + changed, others[1] + words
                if patch is not None:
                    self.patches[bucket] = patch

    def _past(self) -> FlatBuckets:
        """The present buckets, which the next version will be compared with: it gets others."""
        present, spare = self.buckets, self._spare
        if isinstance(present, GatheredBuckets):
            return present.another()
        if spare is None or spare.device != present.device:
            spare = present.another()
        self.buckets, self._spare = spare, present
        return present

    def copy_params(self, params: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters; the training thread's fence waits for it."""
        self._prepare()
        self.buckets.copy_from(params, self.wire.cast)

    # Implemented by each transport; called with ``lock`` held:

    def _prepare(self) -> None:
        """Called before the buckets are overwritten."""

    def _refs(self, version: int) -> tuple[Any, ...]:
        """The places of the buckets, for a ticket."""
        return ()

    def _send(self, ticket: Ticket) -> int:
        """Send the present snapshot; returns the bytes to each receiver."""
        return sum(self.manifest.bucket_bytes)
