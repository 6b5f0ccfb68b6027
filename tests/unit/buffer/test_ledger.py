"""The ledger refuses every step that would lose, invent or train a rollout twice."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from asyncrlhf.buffer.ledger import MAX_FAILURE_REASONS, Ledger
from asyncrlhf.errors import LedgerError
from tests.unit.buffer.world import make_prompt

# What each call may follow, written down once more by hand.
ALLOWED = {
    "start": {"admitted"},
    "finish_generation": {"generating"},
    "buffer": {"scoring"},
    "train": {"buffered"},
    "train_again_later": {"buffered"},
    "drop": {"admitted", "generating", "scoring", "buffered"},
    "fail": {"admitted", "generating", "scoring"},
    "requeue": {"generating", "scoring"},
}
CALLS: dict[str, Callable[[Ledger], None]] = {
    "start": lambda b: b.start(0, "g1", 3),
    "finish_generation": lambda b: b.finish_generation(0),
    "buffer": lambda b: b.buffer(0),
    "train": lambda b: b.train(0, 5, last_use=True),
    "train_again_later": lambda b: b.train(0, 5, last_use=False),
    "drop": lambda b: b.drop(0, "stale"),
    "fail": lambda b: b.fail(0, "reward was not finite"),
    "requeue": lambda b: b.requeue(0),
}
PATHS: dict[str, list[str]] = {
    "admitted": [],
    "generating": ["start"],
    "scoring": ["start", "finish_generation"],
    "buffered": ["start", "finish_generation", "buffer"],
    "trained": ["start", "finish_generation", "buffer", "train"],
    "dropped": ["drop"],
    "failed": ["fail"],
}


def ledger_in(state: str) -> Ledger:
    book = Ledger()
    book.admit(0, 0, make_prompt(0), 1.0)
    for call in PATHS[state]:
        CALLS[call](book)
    return book


@pytest.mark.parametrize("call", ALLOWED)
@pytest.mark.parametrize("state", PATHS)
def test_only_the_drawn_transitions_are_possible(state: str, call: str) -> None:
    book = ledger_in(state)
    before = book.state_dict()
    if state in ALLOWED[call]:
        CALLS[call](book)
    else:
        with pytest.raises(LedgerError, match=r"rollout 0 is \w+; .* needs one of"):
            CALLS[call](book)
        assert book.state_dict() == before
    book.check()


def test_message_names_id_state_and_what_was_asked() -> None:
    with pytest.raises(LedgerError, match="rollout 0 is generating; buffer needs one of: scoring"):
        ledger_in("generating").buffer(0)


@pytest.mark.parametrize("rollout_id", [0, 2, 5])
def test_ids_are_issued_without_gaps_or_repeats(rollout_id: int) -> None:
    book = ledger_in("trained")
    with pytest.raises(LedgerError, match="the next id is 1"):
        book.admit(rollout_id, 0, make_prompt(0), 0.0)


def test_ended_and_unknown_ids_are_told_apart() -> None:
    book = ledger_in("dropped")
    assert book.get(0) is None
    with pytest.raises(LedgerError, match="rollout 1 was never admitted"):
        book.get(1)
    with pytest.raises(LedgerError, match="rollout -1 was never admitted"):
        book.start(-1, "g0", 0)


def test_one_use_a_step() -> None:
    book = ledger_in("buffered")
    book.train(0, 5, last_use=False)
    for version in (5, 4):
        with pytest.raises(LedgerError, match="trained at version 5 already"):
            book.train(0, version, last_use=True)
    book.train(0, 6, last_use=True)
    assert (book.counts()["trained"], book.counts()["uses"]) == (1, 2)


def test_evicted_after_a_use_counts_as_trained() -> None:
    book = ledger_in("buffered")
    book.train(0, 5, last_use=False)
    assert book.counts()["buffered"] == 1
    book.drop(0, "stale")
    counts = book.counts()
    assert (counts["trained"], counts["dropped"], counts["buffered"]) == (1, 0, 0)


def test_requeue_keeps_the_prompt_and_counts_the_attempt() -> None:
    book = ledger_in("scoring")
    book.requeue(0)
    book.start(0, "g2", 9)
    entry = book.get(0)
    assert entry is not None
    assert (entry.attempt, entry.generator_id, entry.version, entry.prompt.prompt_id) == (1, "g2", 9, "p0")


def test_counts_by_reason_and_live_ids() -> None:
    book = Ledger()
    for i in range(6):
        book.admit(i, i // 2, make_prompt(i // 2), 0.0)
    book.drop(0, "stale")
    book.drop(4, "untrainable")
    book.fail(1, "timed out")
    book.start(3, "g0", 0)
    counts = book.counts()
    assert counts["dropped_by_reason"] == {"stale": 1, "untrainable": 1, "failed": 0, "shutdown": 0, "rolled_back": 0}
    assert (counts["dropped"], counts["failed"], counts["failed_by_reason"]) == (2, 1, {"timed out": 1})
    assert (book.live_ids(), book.live_ids("admitted"), book.live_ids("generating")) == ([2, 3, 5], [2, 5], [3])
    with pytest.raises(LedgerError, match="drop reason 'bored' is unknown"):
        book.drop(2, "bored")  # type: ignore[arg-type]


def test_ended_rollouts_take_no_memory() -> None:
    book = Ledger()
    for i in range(5000):
        book.admit(i, i, make_prompt(i), 0.0)
        book.fail(i, f"sentence number {i}")
    assert len(json.dumps(book.state_dict())) < 2000
    assert len(book.counts()["failed_by_reason"]) == MAX_FAILURE_REASONS + 1
    assert sum(book.counts()["failed_by_reason"].values()) == 5000


def test_state_survives_json() -> None:
    book = Ledger()
    for i in range(6):
        book.admit(i, i // 2, make_prompt(i // 2), 0.25 * i)
    for i in (0, 1, 2, 3):
        book.start(i, "g1", 4)
    for i in (0, 1):
        book.finish_generation(i)
        book.buffer(i)
    book.train(0, 7, last_use=False)
    book.train(1, 7, last_use=True)
    book.fail(2, "lost")
    state = json.loads(json.dumps(book.state_dict()))
    assert len(state["prompts"]) == 3  # once a group
    other = Ledger()
    other.load_state_dict(state)
    assert other.counts() == book.counts()
    assert other.state_dict() == book.state_dict()
    for i in book.live_ids():
        old, new = book.get(i), other.get(i)
        assert old is not None and new is not None
        assert np.array_equal(old.prompt.token_ids, new.prompt.token_ids) and new.prompt.token_ids.dtype == np.int64
        assert (old.prompt.text, old.prompt.answer, old.prompt.metadata) == (
            new.prompt.text,
            new.prompt.answer,
            new.prompt.metadata,
        )
    with pytest.raises(LedgerError, match="trained at version 7 already"):
        other.train(0, 7, last_use=True)


def test_a_torn_state_is_refused() -> None:
    state = ledger_in("generating").state_dict()
    with pytest.raises(LedgerError, match="2 rollouts were admitted, but 1 are accounted for"):
        Ledger().load_state_dict({**state, "next_id": 2})


def test_undone_training_leaves_each_rollout_where_its_other_uses_say() -> None:
    book = Ledger()
    for i in range(5):
        book.admit(i, i, make_prompt(i), 0.0)
        book.start(i, "g0", 0)
        book.finish_generation(i)
        book.buffer(i)
    book.train(0, 1, last_use=True)  # before what is undone
    book.train(1, 1, last_use=False)
    book.train(1, 3, last_use=True)  # ended by it, but was trained before
    book.train(2, 2, last_use=True)  # by it alone
    book.train(3, 1, last_use=False)
    book.train(3, 2, last_use=False)  # live
    book.train(4, 3, last_use=False)
    book.drop(4, "stale")
    book.undo_training(2)
    book.check()
    counts = book.counts()
    assert (counts["trained"], counts["uses"], counts["buffered"]) == (2, 3, 1)
    assert counts["dropped_by_reason"]["rolled_back"] == 2 and counts["dropped_by_reason"]["stale"] == 0
    entry = book.get(3)
    assert entry is not None and entry.trained_at == (1,)
    book.train(3, 2, last_use=True)
    assert book.counts()["uses"] == 4


def test_a_rollout_that_returns_from_an_undone_training_is_buffered_and_not_dropped() -> None:
    book = Ledger()
    for i in range(2):
        book.admit(i, i, make_prompt(i), 0.0)
        book.start(i, "g0", 0)
        book.finish_generation(i)
        book.buffer(i)
    returned = book.get(0)
    assert returned is not None
    for i in range(2):
        book.train(i, 3, last_use=True)
    book.undo_training(3, [returned])
    book.check()
    counts = book.counts()
    assert (counts["buffered"], counts["trained"], counts["uses"]) == (1, 0, 0)
    assert counts["dropped_by_reason"]["rolled_back"] == 1  # the other one
    book.train(0, 3, last_use=True)
    book.check()
