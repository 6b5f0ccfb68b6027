"""The user's callbacks: which events they receive, and what happens when one raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.validation import check

EVENTS = ("on_step", "on_publish", "on_evaluation", "on_end")
STOP = "stop"


class Callbacks:
    """Calls the user's callbacks. A callback is an object with any of these methods, or a function, which is used as
    ``on_step``:

    - ``on_step(metrics)``: after a learner step, with its line of metrics.jsonl; the return value ``"stop"`` ends the
      run in order, as Ctrl-C does, with a checkpoint.
    - ``on_publish(version)``: every live replica has loaded the weights of that version.
    - ``on_evaluation(step, accuracy)``: after a held-out evaluation.
    - ``on_end(summary)``: with the content of summary.json; also after a failed run.

    They are called one after the other, in threads beside the event loop. One that raises ends the run, with the
    callback's name in the message. Raises ConfigError for an object with none of the methods.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        for callback in callbacks:
            check(
                callable(callback) or any(hasattr(callback, event) for event in EVENTS),
                f"callbacks: {callback!r} is not a callback; allowed: a function of a step's metrics, or an object "
                f"with any of {', '.join(EVENTS)}.",
            )
        self._callbacks = tuple(callbacks)
        self.stop_asked = False

    def call(self, event: str, *arguments: Any) -> None:
        """Call ``event`` of every callback; raises AsyncRLHFError if one raises."""
        for callback in self._callbacks:
            known = any(hasattr(callback, name) for name in EVENTS)
            method = getattr(callback, event, None) if known else callback if event == "on_step" else None
            if method is None:
                continue
            try:
                answer = method(*arguments)
            except Exception as error:  # the user's code may raise anything; the run ends with its name
                name = getattr(callback, "__name__", type(callback).__name__)
                where = f"{name}.{event}" if known else name
                raise AsyncRLHFError(f"The callback {where} raised {type(error).__name__}: {error}") from error
            if event == "on_step" and isinstance(answer, str) and answer == STOP:
                self.stop_asked = True
