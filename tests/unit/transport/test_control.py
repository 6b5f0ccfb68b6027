"""The control line: messages in order, an end that is noticed at once, and who is blamed for what."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from asyncrlhf.transport.group import Line, LineClosedError, collect, dial, own_host, split_endpoint


@pytest.fixture
def ends() -> Iterator[tuple[dict[str, Line], dict[str, Line]]]:
    """Two receivers' lines: the sender's ends and the receivers'."""
    server = socket.create_server(("127.0.0.1", 0))
    ours, theirs = {}, {}
    for name in ("g0", "g1"):
        theirs[name] = dial(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
        ours[name] = Line(server.accept()[0])
    yield ours, theirs
    for line in [*ours.values(), *theirs.values()]:
        line.close()
    server.close()


Ends = tuple[dict[str, Line], dict[str, Line]]


def test_messages_keep_their_order_and_borders(ends: Ends) -> None:
    ours, theirs = ends
    for i in range(100):
        theirs["g0"].send({"i": i, "text": "x" * i * 100})
    assert [ours["g0"].poll(5.0) for _ in range(100)] == [{"i": i, "text": "x" * i * 100} for i in range(100)]
    assert ours["g0"].poll(0.0) is None


def test_end_of_the_other_side_ends_a_wait(ends: Ends) -> None:
    ours, theirs = ends
    theirs["g0"].close()
    with pytest.raises(LineClosedError):
        ours["g0"].poll(60.0)


def test_own_close_ends_another_threads_wait(ends: Ends) -> None:
    ours, _ = ends
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(LineClosedError):
            ours["g0"].poll(60.0)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ours["g0"].close()
    assert ended.wait(30.0)
    thread.join()


def test_collect_is_content_when_all_have_answered(ends: Ends) -> None:
    ours, theirs = ends
    for line in theirs.values():
        line.send({"ready": 1})
    assert collect(ours, "ready", 5.0) == {}


def test_the_dead_are_named_and_the_waiting_are_not(ends: Ends) -> None:
    ours, theirs = ends
    theirs["g1"].close()
    started = time.monotonic()
    assert collect(ours, "ready", 60.0) == {"g1": "died or dropped the connection"}
    assert time.monotonic() - started < 10.0


def test_silent_ones_are_named_after_the_time_out(ends: Ends) -> None:
    ours, theirs = ends
    theirs["g0"].send({"ready": 1})
    assert collect(ours, "ready", 0.05) == {"g1": "gave no answer within 0.05 s"}


def test_refusals_keep_their_reason_beside_deaths(ends: Ends) -> None:
    ours, theirs = ends
    theirs["g0"].send({"error": "wrong manifest"})
    theirs["g1"].close()
    lost = collect(ours, "ready", 5.0)
    assert lost == {"g0": "answered 'wrong manifest'", "g1": "died or dropped the connection"}


def test_endpoint_and_own_host() -> None:
    assert split_endpoint("10.0.0.1:80") == ("10.0.0.1", 80)
    socket.create_server((own_host(), 0)).close()
