"""What counts as left by a session of tests."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import leftovers


def test_shared_memory_counts_unless_it_was_there_before_or_is_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    monkeypatch.setattr(psutil, "process_iter", lambda: ())  # no other program's memory, and nothing in use
    before, driver, ours = (tmp_path / name for name in ("sem.before", "cuda.shm.0.381.1", "torch_897_1401625205_0"))
    for path in (before, driver, ours):
        path.touch()
    assert leftovers._unused({before}) == [ours]
