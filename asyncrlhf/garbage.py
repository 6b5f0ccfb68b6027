"""Settings of Python's garbage collector: how often it looks for cycles, and among which objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# With 1,000 replicas millions of small objects live for as long as a rollout, and imports make as many that stay. With
# Python's own thresholds a fifth of the controller's time and a quarter of the imports' is spent on looking at them.
THRESHOLDS = (100_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage less often meanwhile."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def keep_existing() -> None:
    """Exclude all objects that exist now from every later collection, as :func:`gc.freeze` does.

    A full collection over the modules of torch, transformers and Ray takes 0.4 s, in which the process stands still;
    Ray asks every process for one each 10 s while its object store is over 70% full. What is no longer referenced is
    still freed at once, unless it is part of a cycle.
    """
    gc.freeze()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Collect rarely, and only among objects made meanwhile; the settings are restored at the end."""
    frozen = gc.get_freeze_count()
    with rare_collections():
        keep_existing()
        try:
            yield
        finally:
            if not frozen:  # else they were frozen before, and are shared with a process that forked this one
                gc.unfreeze()
