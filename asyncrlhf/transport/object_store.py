"""Transport through Ray's object store: a ticket carries references to the buckets, receivers fetch them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.transport.sparse import Chain, Head, Link, joined, needed, next_parts
from asyncrlhf.types import WeightManifest


class ObjectStoreSender(WeightSender):
    """Needs Ray. ``ticket`` copies the snapshot into the store once: with ``weights.delta`` what changed since, behind
    whole buckets that are there, which serve receivers without an older version."""

    def __init__(
        self, manifest: WeightManifest, wire: Wire | None = None, sharded: ShardedParams | None = None
    ) -> None:
        super().__init__(manifest, wire=wire, sharded=sharded)
        self._chains: list[Chain] = []  # of each bucket, of the newest snapshot
        self._stored: TransferStats | None = None  # of the newest snapshot

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Begins with whole buckets: a receiver may be gone because a part of the chains is damaged."""
        super().connect(endpoint, receivers, epoch)
        with self.lock:
            self._chains, self._stored = [], None

    def _prepare(self) -> None:
        self._stored = None

    def _refs(self, version: int) -> tuple[Any, ...]:
        import ray

        if self._stored is None:
            started, sizes = time.perf_counter(), self.manifest.bucket_bytes
            parts = next_parts(self._chains if self.wire.sparse else (), self.checksums, self.patches, sizes)
            payloads, starts = joined(parts)
            where = ray.put(payloads.numpy()) if len(payloads) else None
            chains = self._chains or [()] * len(sizes)
            for bucket, patch in parts.items():
                end = self.checksums[bucket] if self.checksums else 0
                if patch is not None:
                    chains[bucket] = (*chains[bucket], Link(end, where, patch.head, starts[bucket]))
                else:
                    chains[bucket] = (Link(end, ray.put(self.buckets.tensors[bucket].cpu().numpy())),)
            self._chains = chains
            self._stored = self.measured(self.payload(parts), time.perf_counter() - started)
        return tuple(self._chains)

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Returns at once, because ``ticket`` has filled the store; ``seconds`` is that time. A receiver has the
        weights when its ``receive`` returns, and Ray itself reports one that died."""
        with self.lock:
            self._check_current(ticket)
            assert self._stored is not None, "a ticket fills the store"
            return replace(self._stored, stall_seconds=self.stall_seconds)

    def close(self) -> None:
        self._chains, self._stored = [], None


class ObjectStoreReceiver(WeightReceiver):
    """Maps the store's memory and copies it into its own staging memory.

    The copy frees the store early, and an engine that loads in place cannot write into shared memory.
    """

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        import ray

        lacking = {bucket: needed(ticket.refs[bucket], self._staged.content(bucket)) for bucket in wanted}
        places = list({link.where: None for chain in lacking.values() for link in chain})
        try:
            arrays = dict(zip(places, ray.get(places, timeout=self._timeout_seconds), strict=True))
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"Weights of version {ticket.version} could not be fetched from the object store within "
                f"{self._timeout_seconds:g} s: {type(error).__name__}."
            ) from error

        def payload(link: Link, head: Head) -> torch.Tensor:
            return torch.from_numpy(arrays[link.where][link.start : link.start + head.nbytes].copy())

        def whole(bucket: int, link: Link) -> None:
            staging.copy_buckets([arrays[link.where]], [bucket])

        for bucket, chain in lacking.items():
            self._staged.follow(ticket, bucket, chain, partial(whole, bucket), payload)
