"""The actor that writes rollout records: token arrays come to it from the object store, and never to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.actors.messages import Address, RolloutBundle, resolved
from asyncrlhf.records.recorder import RolloutRow, write_part


class RecordActor:
    """One call writes one Parquet file, on the controller's machine."""

    def write(
        self, target: str, rows: Sequence[RolloutRow], places: Sequence[Address | None], *bundles: RolloutBundle
    ) -> None:
        """``places``: the address of each row's rollout among ``bundles``; None for a row without one."""
        found = iter(resolved([place for place in places if place is not None], bundles))
        rollouts = [None if place is None else next(found) for place in places]
        write_part(Path(target), rows, rollouts)
