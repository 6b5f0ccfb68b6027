"""Which cores the learner has to itself, and that a run gives them back."""

import os

import pytest

from asyncrlhf.actors.where import available_cores, keep_to, split_cores


def test_every_thread_of_every_rank_has_a_core_and_the_rest_is_for_the_others() -> None:
    split = split_cores({7, 3, 5, 1, 2, 9}, ranks=2, threads=2, other_threads=2)
    assert split is not None
    assert split.ranks == (frozenset({3, 5}), frozenset({7, 9}))
    assert split.others == frozenset({1, 2})


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "others"),
    [(2, 2, 1, 0), (2, 1, 2, 1), (2, 1, 1, 2), (4, 1, 0, 1), (0, 1, 1, 1), (1, 1, 1, 0)],
    ids=["no core left", "threads take all", "two generators", "threads unknown", "no choice", "one core"],
)
def test_without_a_core_for_every_other_thread_all_cores_are_shared(cores, ranks, threads, others) -> None:
    assert split_cores(range(cores), ranks, threads, others) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let a process choose its cores")
def test_keeping_to_no_cores_changes_nothing_and_keeping_to_some_holds_for_this_thread() -> None:
    before = available_cores()
    try:
        keep_to(())
        assert available_cores() == before
        keep_to({min(before)})
        assert available_cores() == {min(before)}
    finally:
        keep_to(before)
