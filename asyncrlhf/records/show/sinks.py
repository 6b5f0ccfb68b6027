"""Receivers of a run's metrics in addition to its own files: W&B, TensorBoard, MLflow or the user's class.

Each sink has its own thread and queue: it may be slow, wait for a network or fail, and the run neither waits for
it nor ends because of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.plugins import load_function
from asyncrlhf.records.write.recorder import METRICS_FILE, plain, read_metrics
from asyncrlhf.validation import check_package

FINISH_SECONDS = 90.0  # for a sink to send its queue after the run's end
ABANDONED_TIMES = 10  # every 0.5 s until the sink's thread ends: its library may start a process again
# Running totals, as further axes for curves, and the metrics of a step that they sum.
TOTALS = {"total/samples": "sequences", "total/tokens": "response_tokens"}
BUILT_IN = {  # classes by their names in logging.sinks
    "wandb": "asyncrlhf.records.show.wandb_sink:WandbSink",
    "tensorboard": "asyncrlhf.records.show.tensorboard_sink:TensorboardSink",
    "mlflow": "asyncrlhf.records.show.mlflow_sink:MlflowSink",
}


def check_sinks(logging: LoggingConfig) -> None:
    """Raise ConfigError for a sink whose package is missing or which cannot be imported."""
    for name in logging.active_sinks:
        if name in ("tensorboard", "mlflow"):
            check_package(f"logging.sinks={name}", name, name)
        elif name != "wandb":
            load_function("logging.sinks", name)


@dataclass(frozen=True)
class RunFacts:
    """The facts that a sink is started with.

    ``config``: the resolved settings, as config.yaml holds them; ``logging``: its group of that name. ``stage``: train,
    sft or reward-model. ``start_step``: steps that were done before; 0 unless the run is resumed. ``say`` shows the
    user one sentence, on the terminal and in the summary.
    """

    run_dir: Path
    config: Mapping[str, Any]
    logging: LoggingConfig
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


class Sinks:
    """All sinks of a run. ``log`` returns at once; ``finish`` waits at most ``seconds`` for each."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        logging: LoggingConfig,
        stage: str = "train",
        start_step: int = 0,
        seconds: float = FINISH_SECONDS,
    ) -> None:
        self._seconds = seconds
        self._one = threading.Lock()
        self._said: list[tuple[str, str]] = []  # (sink, sentence), by several threads
        self._tell: Callable[[str], None] | None = None
        self._totals = _totals_before(Path(run_dir)) if start_step else dict.fromkeys(TOTALS, 0.0)

        def facts(name: str) -> RunFacts:
            return RunFacts(Path(run_dir), plain(config), logging, stage, start_step, partial(self._say, name))

        self._followers = [_Follower(name, facts(name)) for name in logging.active_sinks]

    def tell(self, show: Callable[[str], None]) -> None:
        """Show the user each message by ``show``, those so far at once; it is called from the sinks' threads."""
        with self._one:
            for _, sentence in self._said:
                show(sentence)
            self._tell = show

    def _say(self, name: str, sentence: str) -> None:
        with self._one:
            self._said.append((name, sentence))
            if self._tell is not None:
                self._tell(sentence)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Pass one line to every sink."""
        if not self._followers:
            return
        row = {key: value for key, value in plain(metrics).items() if value is not None}
        for total, key in TOTALS.items():
            self._totals[total] += row.get(key, 0.0)
        if any(self._totals.values()):
            row |= self._totals
        for follower in self._followers:
            follower.put(row)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, list[str]]:
        """End every sink; returns their messages during the run, by name. A second call does nothing."""
        for follower in self._followers:
            follower.end(plain(summary))
        for follower in self._followers:
            follower.join(self._seconds)
        self._followers = []
        names = dict.fromkeys(name for name, _ in self._said)
        return {name: [sentence for other, sentence in self._said if other == name] for name in names}


class _Follower:
    """One sink, its thread and its queue."""

    def __init__(self, name: str, facts: RunFacts) -> None:
        self._name, self._facts = name, facts
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._summary: Mapping[str, Any] = {}
        self._failed = False
        self._sink: Sink | None = None
        # A daemon thread: a sink that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"sink {name}")
        self._thread.start()

    def put(self, row: Mapping[str, Any]) -> None:
        if not self._failed:
            self._queue.put(row)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._summary = summary
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return
        self._failed = True  # what it raises now is no news
        self._facts.say(f"The sink {self._name} had not finished {seconds:g} s after the run's end and was left.")
        abandon: Callable[[], None] | None = getattr(self._sink, "abandon", None)
        if abandon is None:
            return
        for _ in range(ABANDONED_TIMES):
            self._guard(abandon, always=True)
            if not self._thread.is_alive():
                break
            self._thread.join(0.5)

    def _serve(self) -> None:
        self._guard(self._start)
        while (row := self._queue.get()) is not None:
            self._guard(lambda row=row: self._sink.log(row))  # type: ignore[misc,union-attr]
        if (sink := self._sink) is not None:
            self._guard(lambda: sink.finish(self._summary), always=True)

    def _start(self) -> None:
        sink: Sink = load_function("logging.sinks", BUILT_IN.get(self._name, self._name))()
        self._sink = sink
        sink.start(self._facts)

    def _guard(self, action: Callable[[], Any], always: bool = False) -> None:
        if self._failed and not always:
            return
        try:
            action()
        except Exception as error:  # a library or the user's code, with exception types of every kind
            if not self._failed:
                cause = " ".join(str(error).split())
                self._facts.say(
                    f"The sink {self._name} stopped recording ({type(error).__name__}: {cause}); "
                    f"the run continues without it, and {METRICS_FILE} has everything."
                )
            self._failed = True


def _totals_before(run_dir: Path) -> dict[str, float]:
    """The totals of the steps before the one at which a resumed run continues."""
    path = run_dir / METRICS_FILE
    rows = read_metrics(path) if path.exists() else []
    return {total: sum(float(row.get(key) or 0.0) for row in rows) for total, key in TOTALS.items()}
