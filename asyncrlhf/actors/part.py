"""The Ray actor around one worker, which runs the worker's methods by name; and the one that writes records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.actors.messages import Address, resolved
from asyncrlhf.actors.where import Where, where
from asyncrlhf.garbage import keep_existing
from asyncrlhf.records.write.rollout_rows import RolloutRow, write_part
from asyncrlhf.records.write.saved_rollouts import write_rollouts
from asyncrlhf.records.write.spans import SpanBatch


class PartActor:
    """The base of actors with a worker; a subclass sets ``_worker`` when it is built."""

    _worker: Any

    def ready(self) -> bool:
        """Answers when the actor is built, whose parts no later garbage collection looks at."""
        keep_existing()
        return True

    def ping(self) -> bool:
        """Answers even while the worker is busy, in a separate thread."""
        return True

    def where(self) -> Where:
        return where()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The worker's answer. Arguments that were object references arrive as the objects."""
        return getattr(self._worker, method)(*arguments, **keywords)

    def close(self) -> list[SpanBatch]:
        """Close the worker, if it has open resources. Returns its spans since its last answer, if it measures any."""
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
        return []


class RecordActor:
    """Writes rollout records: token arrays reach it from the object store, never through the controller. One call
    writes one Parquet file, on the controller's machine."""

    def ping(self) -> int:
        """The number of its process; answers even while it is writing, in a separate thread."""
        return os.getpid()

    def write(self, target: str, rows: Sequence[RolloutRow], places: Sequence[Address | None], *bundles: Any) -> int:
        """``places``: the address of each row's rollout among ``bundles``; None for a row without one. Returns the
        number of its process."""
        found = iter(resolved([place for place in places if place is not None], bundles))
        rollouts = [None if place is None else next(found) for place in places]
        write_part(Path(target), rows, rollouts)
        return os.getpid()

    def save(self, target: str, addresses: Sequence[Address], *bundles: Any) -> int:
        """Write the rollouts of a checkpoint, joined with their annotations' arrays. Returns as :meth:`write`."""
        write_rollouts(Path(target), resolved(addresses, bundles))
        return os.getpid()
