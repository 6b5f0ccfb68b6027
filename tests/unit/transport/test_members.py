"""Losses that the sender hears one after the other."""

from __future__ import annotations

import socket
import threading

import pytest

from asyncrlhf.transport.collective import members
from asyncrlhf.transport.collective.control_line import Line
from asyncrlhf.transport.collective.sender import Members
from asyncrlhf.transport.protocol import LostReceiversError


def ends() -> tuple[Line, Line]:
    """Both ends of a control line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    return Line(near), Line(far)


def test_a_death_is_named_although_the_receivers_that_it_starved_speak_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "GRACE_SECONDS", 60.0)
    group, others = Members(0, 60.0), {}
    for name in ("dies", "starves", "waits"):
        group.lines[name], others[name] = ends()
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
    group.lines["busy"], _ = ends()
    group.watch("Version 1 was lost", 0.01)
    group.drop()
