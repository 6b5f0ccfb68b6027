"""The control line: messages in order, an end that is noticed at once, and who is blamed for what."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from asyncrlhf.transport.collective import control_line, sender
from asyncrlhf.transport.collective.control_line import (
    Line,
    LineClosedError,
    admit,
    collect,
    dial,
    join_endpoint,
    new_token,
    own_host,
    split_endpoint,
)
from asyncrlhf.transport.collective.sender import Members
from asyncrlhf.transport.protocol import LostReceiversError


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
    assert split_endpoint(join_endpoint("secret", "10.0.0.1", 80)) == ("secret", "10.0.0.1", 80)
    assert new_token() != new_token()
    socket.create_server((own_host(), 0)).close()


NONSENSE = [
    b"\x00\xff\x16\x03\x01\r\n" * 50,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[" * 4000 + b"\n",
    b"[1, 2]\n",
    b"{}\n",
    b'{"token": "\\ud800", "name": "g0"}\n',
    b'{"token": 7, "name": "g0"}\n',
    b'{"token": "wrong", "name": "g0"}\n',
    b'{"name": "' + b"x" * 10_000_000,
    b"",
]


def callers(server: socket.socket) -> list[socket.socket]:
    """One for each kind of nonsense, its bytes sent as far as anybody reads them."""
    made = []
    for said in NONSENSE:
        caller = socket.create_connection(server.getsockname())
        caller.setblocking(False)
        caller.send(said)
        made.append(caller)
    return made


def test_strangers_are_sent_away_and_keep_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        strangers = callers(server) + [socket.create_connection(server.getsockname()) for _ in range(20)]
        strangers[-1].sendall(b'{"token": "half a hel')
        line = dial("{}:{}".format(*server.getsockname()), 5.0)
        line.send({"token": "secret", "name": "g0"})
        started = time.monotonic()
        admitted, hello = next(admit(server, "secret", lambda hello: hello.get("name") == "g0", 30.0))
        assert time.monotonic() - started < control_line.HELLO_SECONDS, "those who say nothing were waited for"
        assert hello == {"name": "g0"}, "the token goes no further"
        line.send({"longer": "than a hello" * 10_000})
        assert admitted.poll(5.0) is not None
        for opened in (*strangers, line, admitted):
            opened.close()


def test_a_crowd_of_silent_callers_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_line, "CALLERS", 4)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        crowd = [socket.create_connection(server.getsockname()) for _ in range(40)]
        line = dial("{}:{}".format(*server.getsockname()), 5.0)
        line.send({"token": "secret"})
        admitted, _ = next(admit(server, "secret", lambda _: True, 30.0))
        crowd[0].settimeout(5.0)
        assert crowd[0].recv(1) == b"", "the first one was sent away"
        for opened in (*crowd, line, admitted):
            opened.close()


def test_nobody_at_all_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        strangers = callers(server)
        assert list(admit(server, "secret", lambda _: True, 0.2)) == []
        for opened in strangers:
            opened.close()


@pytest.mark.parametrize("said", [b"no json\n", b"3\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_message_ends_a_line(ends: Ends, said: bytes) -> None:
    ours, theirs = ends
    theirs["g0"]._socket.sendall(said)
    with pytest.raises(LineClosedError):
        ours["g0"].poll(5.0)


# --- losses that the sender hears one after the other ----------------------------------------------------------------


def both_ends() -> tuple[Line, Line]:
    """Both ends of a control line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    return Line(near), Line(far)


def test_a_death_is_named_although_the_receivers_that_it_starved_speak_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "GRACE_SECONDS", 60.0)
    group, others = Members(0, 60.0), {}
    for name in ("dies", "starves", "waits"):
        group.lines[name], others[name] = both_ends()
    others["starves"].send({"error": "a peer is gone"})
    death = threading.Timer(0.1, others["dies"].close)
    death.start()
    with pytest.raises(LostReceiversError, match="Version 1") as caught:
        group.watch("Version 1 was lost", 60.0)
    death.join()
    assert caught.value.receivers.keys() == {"dies", "starves"}, "one that is silent is not lost"
    assert "died" in caught.value.receivers["dies"] and "a peer is gone" in caught.value.receivers["starves"]
    group.drop()


def test_silence_before_all_has_been_sent_is_no_loss() -> None:
    group = Members(0, 60.0)
    group.lines["busy"], _ = both_ends()
    group.watch("Version 1 was lost", 0.01)
    group.drop()
