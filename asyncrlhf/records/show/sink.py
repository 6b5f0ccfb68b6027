"""What a receiver of a run's metrics is: the protocol, and what it is told at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunFacts:
    """The facts that a sink is started with.

    ``config``: the resolved settings, as config.yaml holds them. ``stage``: train, sft or reward-model. ``start_step``:
    steps that were done before; 0 unless the run is resumed. ``say`` shows the user one sentence, on the terminal and
    in the summary.
    """

    run_dir: Path
    config: Mapping[str, Any]
    stage: str
    start_step: int
    say: Callable[[str], None]


class Sink(Protocol):
    """Receives a run's metrics. ``logging.sinks=[my_module:MySink]`` calls ``MySink()`` and then, in one thread, these
    three methods. An exception in one of them switches the sink off, but the run continues; ``finish`` is still
    called. A method ``abandon()``, if there is one, is called from another thread when ``finish`` takes too long: it
    ends the sink's processes, so that none outlives the run."""

    def start(self, run: RunFacts) -> None:
        """Called once, before any metrics."""
        ...

    def log(self, metrics: Mapping[str, Any]) -> None:
        """One line: a learner step's as in metrics.jsonl, or a held-out evaluation before the first step or after the
        last. ``step`` is always present, ``total/samples`` and ``total/tokens`` if known, and only finite values."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called once, with the content of summary.json."""
        ...
