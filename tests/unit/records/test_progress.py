"""The live display: plain lines are few but tell the first and last step; the terminal shows the newest facts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(step: int) -> dict[str, object]:
    return {
        "step": step,
        "reward_mean": step / 100,
        "staleness_mean": 1.25,
        "staleness_max": 2,
        "learner_idle_fraction": 0.1,
        "generator_idle_fraction": 0.4,
        "buffer_size": 96,
        "samples_per_second": 1234.5,
    }


def plain(total: int, clock: Clock, **settings: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, "auto", console=Console(file=out, width=40), clock=clock, **settings), out


def test_plain_lines_come_once_a_second_and_always_first_and_last() -> None:
    clock = Clock()
    progress, out = plain(100, clock)
    for step in range(1, 101):
        clock.now += 0.3
        progress.update(metrics(step))
    progress.stop()
    progress.stop()
    lines = out.getvalue().splitlines()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == [*range(1, 100, 4), 100]  # every fourth update passes the second


def test_a_line_tells_what_matters_and_when_it_ends() -> None:
    clock = Clock()
    progress, out = plain(100, clock)
    clock.now = 10.0
    progress.update({**metrics(20), "heldout_accuracy": 0.5})
    clock.now = 12.5
    progress.update({**metrics(25), "heldout_accuracy": None})
    first, second = out.getvalue().splitlines()
    assert first == (
        "step 20/100: reward 0.200, staleness 1.2 (max 2), held-out 0.500, samples/s 1,234, learner idle 10%, "
        "generators idle 40%, buffer 96, ETA 40 s"
    )
    assert "held-out 0.500" in second and second.endswith("ETA 38 s")


def test_a_resumed_run_counts_only_its_own_steps_for_the_eta() -> None:
    clock = Clock()
    progress, out = plain(100, clock, start_step=50)
    clock.now = 20.0
    progress.update(metrics(60))
    assert "ETA 1 min 20 s" in out.getvalue()


def test_messages_are_printed_as_they_are_and_nothing_for_no_step_or_in_mode_none() -> None:
    progress, out = plain(10, Clock())
    progress.stop()
    assert out.getvalue() == ""
    progress, out = plain(10, Clock())
    progress.message("replica [red]generator-1[/red] died")
    assert out.getvalue() == "replica [red]generator-1[/red] died\n"
    silent_out = io.StringIO()
    silent = Progress(10, "none", console=Console(file=silent_out, force_terminal=True))
    silent.update(metrics(1))
    silent.message("hello")
    silent.stop()
    assert silent_out.getvalue() == ""
    with pytest.raises(ConfigError, match=r"logging\.progress"):
        Progress(10, "fancy")


def terminal(total: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    return Progress(total, "auto", console=console, clock=Clock()), out


def test_a_terminal_gets_a_live_display() -> None:
    progress, out = terminal(100)
    progress.update(metrics(7))
    progress.message("a note")
    progress.update(metrics(8))
    progress.stop()
    shown = out.getvalue()
    last = shown[shown.rindex("step 8 of 100") :]
    for fact in ("reward 0.080", "staleness 1.2 (max 2)", "learner idle 10%", "generators idle 40%", "buffer 96"):
        assert fact in last
    assert "a note" in shown


def test_the_start_tells_how_far_it_is() -> None:
    progress, out = terminal(10)
    progress.phase("Actors: 3 of 5 ready")
    progress.begin()
    progress.update(metrics(1))
    progress.stop()
    shown = out.getvalue()
    assert shown.index("Actors: 3 of 5 ready") < shown.index("step 1 of 10")
    lines, written = plain(10, Clock())
    lines.phase("Starting Ray")
    assert written.getvalue() == "Starting Ray.\n"


def test_the_stages_of_the_start_add_up_to_it() -> None:
    clock = Clock()
    lines, _ = plain(10, clock)
    # On one GPU the actors start one after the other.
    loading = ("Loading the model in 1 actors", "Actors: 1 of 1 ready")
    for seconds, text in zip((3.0, 2.0, 1.0, 4.0, 0.25), ("Starting Ray", *loading, *loading), strict=True):
        clock.now += seconds
        lines.phase(text)
    lines.stage("first evaluation")
    clock.now += 8.0
    lines.begin()
    clock.now += 0.5
    assert lines.stage_seconds() == {
        "preparation": 3.0, "starting Ray": 2.0, "loading the model in 1 actors": 5.25, "first evaluation": 8.0,
        "first step": 0.5,
    }  # fmt: skip
