"""The Ray actor around one worker, which runs the worker's methods by name; and the one that writes records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.actors.messages import Address, RolloutBundle, resolved
from asyncrlhf.actors.where import Where, where
from asyncrlhf.records.rollout_rows import RolloutRow, write_part
from asyncrlhf.records.saved_rollouts import write_rollouts
from asyncrlhf.records.spans import SpanBatch


class PartActor:
    """A class that derives from it sets ``_worker`` when it is built."""

    _worker: Any

    def ready(self) -> bool:
        """Answers once the actor is built."""
        return True

    def ping(self) -> bool:
        """Answers whatever the worker is at: its caller gives it a thread of its own."""
        return True

    def where(self) -> Where:
        return where()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The worker's answer. Arguments that were object references arrive as the objects."""
        return getattr(self._worker, method)(*arguments, **keywords)

    def close(self) -> list[SpanBatch]:
        """Close the worker, if it holds anything open. Returns what the part did since it told last, where it does."""
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
        return []


class RecordActor:
    """Writes rollout records: token arrays come to it from the object store, and never to the controller. One call
    writes one Parquet file, on the controller's machine."""

    def write(
        self, target: str, rows: Sequence[RolloutRow], places: Sequence[Address | None], *bundles: RolloutBundle
    ) -> None:
        """``places``: the address of each row's rollout among ``bundles``; None for a row without one."""
        found = iter(resolved([place for place in places if place is not None], bundles))
        rollouts = [None if place is None else next(found) for place in places]
        write_part(Path(target), rows, rollouts)

    def save(self, target: str, addresses: Sequence[Address], *bundles: Any) -> None:
        """The rollouts of a checkpoint, joined with the arrays of their annotations."""
        write_rollouts(Path(target), resolved(addresses, bundles))
