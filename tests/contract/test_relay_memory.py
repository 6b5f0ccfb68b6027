"""A holder that is pulled from: what others may be reading stays as it is, whatever arrives meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.relay import RelayReceiver
from tests.contract.test_transports import Link, assert_same, model


@pytest.fixture(params=["none", "sparse"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Link]:
    made = Link("relay", tmp_path, model(), delta=request.param, checksum=True)
    made.connect(["g0"], 0)
    yield made
    made.close()


def pulled(link: Link, version: int, read: list[Any]) -> Ticket:
    """The holder's offer after a publish of ``version``, while others read at the places ``read``."""
    ticket, holder = link.begin(version, model(float(version))), link.receivers["g0"]
    assert isinstance(holder, RelayReceiver)
    receiving = link.pool.submit(holder.receive, ticket, read)
    link.sender.transfer(ticket)
    receiving.result(timeout=60)
    return holder.offer()


def loaded(ticket: Ticket) -> dict[str, Any]:
    """What a neighbour loads; checksums are verified."""
    neighbour = RelayReceiver()
    return {name: tensor for views in neighbour.stream(ticket) for name, tensor in views.items()}


def test_a_version_that_is_read_stays_while_the_next_ones_arrive(link: Link) -> None:
    first = pulled(link, 1, [])
    held = loaded(first)
    second = pulled(link, 2, [first.refs])
    third = pulled(link, 3, [first.refs, second.refs])
    assert len({first.refs, second.refs, third.refs}) == 3
    for version, ticket in ((1, first), (2, second), (3, third)):
        assert_same(loaded(ticket), model(float(version)))
    assert_same(held, model(1.0))
    fourth = pulled(link, 4, [third.refs])
    assert fourth.refs in (first.refs, second.refs), "memory that no load reads is used again"
    assert_same(loaded(fourth), model(4.0))
    assert_same(loaded(third), model(3.0))


def test_it_outlives_the_group_that_brought_it(link: Link) -> None:
    first = pulled(link, 1, [])
    link.connect(["g0"], 1)
    assert_same(loaded(first), model(1.0))
    assert_same(loaded(pulled(link, 2, [first.refs])), model(2.0))
    assert_same(loaded(first), model(1.0))
