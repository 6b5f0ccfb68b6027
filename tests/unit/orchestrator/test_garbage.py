"""During a run a full collection looks at what the run made alone; it would stop the event loop for the rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrlhf.actors.part import PartActor
from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.show.callbacks import Callbacks
from tests.loop import FAKE, QUIET


@pytest.fixture
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


class Counting:
    def on_step(self, metrics: object) -> None:
        self.collected = len(gc.get_objects())
        self.thresholds = gc.get_threshold()


@pytest.mark.usefixtures("unfrozen")
def test_a_run_collects_only_its_own_garbage_and_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    before, imported = gc.get_threshold(), len(gc.get_objects())
    counting = Counting()
    overrides = [f"run_dir={tmp_path}", "runtime=local", "steps=2", *QUIET, *FAKE]
    train(load_config(overrides), Callbacks([counting]))
    assert counting.collected < imported / 2, "a collection would look at the imported modules"
    assert counting.thresholds > before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfrozen")
def test_a_built_actor_is_left_alone_by_collections() -> None:
    load_config([])  # has imported enough
    imported = len(gc.get_objects())
    assert PartActor().ready()
    assert len(gc.get_objects()) < imported / 10
