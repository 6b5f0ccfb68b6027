"""A signal ends a run also where Python swallows the exception that it raises."""

from __future__ import annotations

import asyncio
import signal
import weakref

import pytest

from asyncrlhf.orchestrator.start.interruption import in_order, like_ctrl_c


class Target:
    pass


def swallowed(number: signal.Signals) -> None:
    """The signal comes while the callback of a weak reference runs, as those of imports do."""
    target = Target()
    reference = weakref.ref(target, lambda _: signal.raise_signal(number))
    del target
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("further", ["another context", "the run's own"])
def test_a_signal_whose_exception_was_lost_ends_what_comes_next(further: str) -> None:
    async def run() -> None:
        with in_order(lambda notice: pytest.fail("in order"), print):
            pytest.fail("the run began")

    with pytest.raises(KeyboardInterrupt), like_ctrl_c():
        swallowed(signal.SIGHUP)
        if further == "another context":
            with like_ctrl_c():
                pytest.fail("the context began")
        asyncio.run(run())
    with like_ctrl_c():
        pass  # of a later command in this process nothing is left
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
