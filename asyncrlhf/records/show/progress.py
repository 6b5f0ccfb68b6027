"""What a run shows while it runs: the terminal's live panel; sinks and the user's callbacks get the same values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from asyncrlhf.records.show.callbacks import Callbacks
from asyncrlhf.records.show.sinks import Sinks
from asyncrlhf.records.show.summary import duration
from asyncrlhf.redaction import redact
from asyncrlhf.validation import check_choice


class Progress:
    """``total`` steps, of which ``start_step`` were done before (a resumed run). ``mode``: auto, rich, plain or none.

    Plain lines come at most once a second, but always for the first and the last step. ``clock`` (real time, in
    seconds) and ``console`` are parameters for tests.
    """

    def __init__(
        self,
        total: int,
        mode: str = "auto",
        *,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_choice("logging.progress", mode, ("auto", "rich", "plain", "none"))
        self._console = console if console is not None else Console()
        self._mode = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._total = total
        self._clock = clock
        self._start_step = start_step
        self._start_time = clock()
        self._stages = [("preparation", self._start_time)]  # of the set-up, and when each began
        self._latest: dict[str, Any] = {"step": start_step}
        self._phase = ""
        self._printed_step: int | None = None
        self._printed_at = float("-inf")
        self._live: Live | None = None
        if self._mode == "rich":
            self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def phase(self, text: str) -> None:
        """Show the stage of the set-up: as the live display's title, or as a line."""
        self._phase = text
        if ":" not in text:  # else it says how far the stage is
            self.stage(text)
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        else:
            self.message(f"{text}.")

    def begin(self) -> None:
        """End the set-up: the ETA counts time from here on."""
        self._start_time, self._phase = self._clock(), ""
        self.stage("first step")

    def stage(self, name: str) -> None:
        """The next stage of the set-up begins. A name that comes again is the same stage."""
        self._stages.append((name[:1].lower() + name[1:], self._clock()))

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage of the set-up, and of the first step so far."""
        seconds = dict.fromkeys((name for name, _ in self._stages), 0.0)
        for (name, start), (_, end) in pairwise([*self._stages, ("", self._clock())]):
            seconds[name] += end - start
        return seconds

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show one learner step's metrics. A value that this step lacks (held-out accuracy) keeps its last one."""
        self._latest.update({key: value for key, value in metrics.items() if value is not None})
        if self._live is not None:
            self._live.update(self._render())
        elif self._mode == "plain" and self._clock() - self._printed_at >= 1.0:
            self._print_line()

    def message(self, text: str) -> None:
        """Show one line above the live display; nothing in mode none."""
        if self._mode != "none":
            self._console.print(redact(text), markup=False, highlight=False)

    def stop(self) -> None:
        """End the display. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._mode == "plain" and self._latest["step"] not in (self._printed_step, self._start_step):
            self._print_line()
        self._mode = "none"

    def _print_line(self) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts())
        self._console.print(
            f"step {self._latest['step']}/{self._total}: {facts}", markup=False, highlight=False, soft_wrap=True
        )
        self._printed_step, self._printed_at = self._latest["step"], self._clock()

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        facts = self._facts()
        for start in range(0, len(facts), 3):
            grid.add_row(*(f"[dim]{name}[/] [bold]{value}[/]" for name, value in facts[start : start + 3]))
        body = Table.grid(expand=True)
        body.add_row(ProgressBar(total=self._total, completed=min(self._latest["step"], self._total)))
        body.add_row(grid)
        title = self._phase or f"step {self._latest['step']} of {self._total}"
        return Panel(body, title=title, title_align="left", width=92)

    def _facts(self) -> list[tuple[str, str]]:
        """The displayed facts in a fixed order: name and text."""
        get = self._latest.get
        formats = [
            ("reward", "{:.3f}", "reward_mean"),
            ("held-out", "{:.3f}", "heldout_accuracy"),
            ("samples/s", "{:,.0f}", "samples_per_second"),
            ("learner idle", "{:.0%}", "learner_idle_fraction"),
            ("generators idle", "{:.0%}", "generator_idle_fraction"),
        ]
        facts = [(name, text.format(get(key))) for name, text, key in formats if get(key) is not None]
        if get("staleness_mean") is not None:
            worst = f" (max {get('staleness_max'):.0f})" if get("staleness_max") is not None else ""
            facts.insert(1, ("staleness", f"{get('staleness_mean'):.1f}{worst}"))
        if get("buffer_size") is not None:
            facts.append(("buffer", f"{get('buffer_size'):.0f}"))
        if get("generators_alive") is not None:
            late = get("generators_held_back") or 0
            note = f" ({late:.0f} held back)" if late else ""
            facts.append(("generators", f"{get('generators_alive'):.0f}{note}"))
        left = self._total - self._latest["step"]
        facts.append(("ETA", self._eta()) if left > 0 else ("took", duration(self._clock() - self._start_time)))
        return facts

    def _eta(self) -> str:
        done = self._latest["step"] - self._start_step
        if done <= 0:
            return "?"
        seconds = (self._clock() - self._start_time) / done * max(0, self._total - self._latest["step"])
        return duration(seconds)


class RunView(Progress):
    """A run's progress, sinks and callbacks. Only ``message`` may run on the event loop: users' callbacks may be
    slow. ``began``: when the run was asked for, by ``time.monotonic``; now if None."""

    def __init__(
        self, sinks: Sinks, total: int, mode: str, start_step: int, callbacks: Callbacks, began: float | None = None
    ) -> None:
        super().__init__(total, mode, start_step=start_step)
        if began is not None:
            self._stages = [("preparation", began)]
        self.start_seconds: dict[str, float] = {}
        self._sinks = sinks
        sinks.tell(self.message)
        self._callbacks = callbacks
        self._resumed = start_step > 0

    @property
    def stop_asked(self) -> bool:
        """Whether a callback asked to end the run in order after this step."""
        return self._callbacks.stop_asked

    def step(self, metrics: Mapping[str, Any]) -> None:
        if not self.start_seconds:
            self.start_seconds = self.stage_seconds()
            stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_seconds.items())
            self.message(f"The first step ended {sum(self.start_seconds.values()):.1f} s after the imports: {stages}.")
        self.update(metrics)
        self._sinks.log(metrics)
        self._callbacks.call("on_step", dict(metrics))

    def evaluated(self, step: int, accuracy: float) -> None:
        self._callbacks.call("on_evaluation", step, accuracy)

    def evaluated_apart(self, step: int, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Log an evaluation before the first step or after the last, which no step's line has. The one at a resumed
        run's start is left out: the first attempt's remains the baseline."""
        if not (self._resumed and step == self._start_step):
            self._sinks.log({"step": step, "wall_time": wall_time, **metrics})

    def published(self, version: int) -> None:
        self._callbacks.call("on_publish", version)
