"""One process with the references for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.references.isolated import Peers, peers


@pytest.fixture(scope="session")
def ask() -> Iterator[Peers]:
    with peers() as started:
        yield started
