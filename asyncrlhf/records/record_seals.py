"""Size and hash of each Parquet part that a checkpoint counts on, taken once per part."""

from __future__ import annotations

from pathlib import Path

from asyncrlhf.data.checkpoint_manifest import Seals, seal
from asyncrlhf.records.record_marker import RecordMarker
from asyncrlhf.records.rollout_tokens import TOKENS_FOLDER


class RecordSeals:
    """The seals of a run's parts, by their paths within its folder. A part changes only by a rollback, which calls
    :meth:`forget_after`. Not thread-safe."""

    def __init__(self, run_dir: Path, known: Seals) -> None:
        self._run_dir = run_dir
        self._known = dict(known)

    def of(self, marker: RecordMarker) -> Seals:
        """The seals of all parts that ``marker`` counts, and of ``rollout_tokens/`` up to its step. Reads only parts
        without a seal, which must be complete, and brings them to disk."""
        tokens = (self._run_dir / TOKENS_FOLDER).glob("steps-*.parquet")
        names = {*marker.part_names(), *(f"{TOKENS_FOLDER}/{path.name}" for path in tokens)}
        new = sorted(name for name in names - self._known.keys() if marker.counts_on(name))
        self._known |= seal(self._run_dir, (self._run_dir / name for name in new))
        return {name: facts for name, facts in self._known.items() if marker.counts_on(name)}

    def forget_after(self, marker: RecordMarker) -> None:
        """Forget the parts that ``marker`` does not count: they are removed or written again."""
        self._known = {name: facts for name, facts in self._known.items() if marker.counts_on(name)}
