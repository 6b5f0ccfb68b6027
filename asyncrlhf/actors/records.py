"""The actor that writes rollout records: token arrays come to it from the object store, and never to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.records.recorder import RolloutRow, write_part


class RecordActor:
    """One call writes one Parquet file, on the controller's machine."""

    def write(
        self, target: str, rows: Sequence[RolloutRow], places: Sequence[tuple[int, int] | None], *bundles: RolloutBundle
    ) -> None:
        """``places``: the bundle of each row's rollout and its index there; None for a row without one."""
        rollouts = [None if place is None else bundles[place[0]][place[1]] for place in places]
        write_part(Path(target), rows, rollouts)
