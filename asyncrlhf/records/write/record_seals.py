"""Size and hash of what a checkpoint counts on: of each Parquet part once, and of the first lines of growing files."""

from __future__ import annotations

from pathlib import Path

from asyncrlhf.data.checkpoint_manifest import LinesSeal, Seals, seal
from asyncrlhf.records.write.record_marker import METRICS_FILE, RecordMarker
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER


class RecordSeals:
    """The seals of a run's records, by their paths within its folder. Parts and lines change only by a rollback, which
    calls :meth:`forget_after`. Not thread-safe."""

    def __init__(self, run_dir: Path, known: Seals) -> None:
        self._run_dir = run_dir
        self._known = dict(known)
        self._lines: dict[str, LinesSeal] = {}  # by file

    def of(self, marker: RecordMarker) -> Seals:
        """The seals of lines and parts that ``marker`` counts, and of ``rollout_tokens/`` up to its step. Reads only
        those without a seal, which must be complete, and brings the parts to disk."""
        tokens = (self._run_dir / TOKENS_FOLDER).glob("steps-*.parquet")
        names = {*marker.part_names(), *(f"{TOKENS_FOLDER}/{path.name}" for path in tokens)}
        new = sorted(name for name in names - self._known.keys() if marker.counts_on(name))
        self._known |= seal(self._run_dir, (self._run_dir / name for name in new))
        found = {name: facts for name, facts in self._known.items() if marker.counts_on(name)}
        for name, lines in marker.lines.items():
            if lines:
                found[name] = self._lines.setdefault(name, LinesSeal(self._run_dir / name)).of(lines)
        return found

    def forget_after(self, marker: RecordMarker) -> None:
        """Forget what ``marker`` does not count, which is removed or written again. The journal keeps its lines."""
        self._lines.pop(METRICS_FILE, None)
        self._known = {name: facts for name, facts in self._known.items() if marker.counts_on(name)}
