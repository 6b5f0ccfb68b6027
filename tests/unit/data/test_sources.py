"""The prompt cursor: order by seed, epochs, resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import CheckpointError
from asyncrlhf.types import Prompt


def prompt_at(index: int) -> Prompt:
    return Prompt(prompt_id=str(index), text=f"text {index}", token_ids=np.array([index]))


def take(source: PromptSource, count: int) -> list[str]:
    return [source.next().prompt_id for _ in range(count)]


def test_every_epoch_holds_each_prompt_once_in_another_order() -> None:
    source = PromptSource(prompt_at, length=20, seed=3)
    epochs = [take(source, 20) for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_decides_the_order() -> None:
    first, again, other = (take(PromptSource(prompt_at, 50, seed), 50) for seed in (1, 1, 2))
    assert first == again != other


def test_without_a_length_the_index_runs_on() -> None:
    assert take(PromptSource(prompt_at, None, seed=0), 4) == ["0", "1", "2", "3"]


@given(length=st.one_of(st.none(), st.integers(1, 7)), before=st.integers(0, 30), seed=st.integers(0, 5))
def test_a_restored_source_goes_on_exactly_there(length: int | None, before: int, seed: int) -> None:
    source = PromptSource(prompt_at, length, seed)
    take(source, before)
    state = json.loads(json.dumps(source.state()))
    expected = take(source, 15)
    restored = PromptSource(prompt_at, length, seed)
    restored.restore(state)
    assert take(restored, 15) == expected


@pytest.mark.parametrize("other", [{"length": 9, "seed": 0}, {"length": 8, "seed": 1}])
def test_the_state_of_another_source_is_refused(other: dict[str, int]) -> None:
    state = PromptSource(prompt_at, 8, 0).state()
    with pytest.raises(CheckpointError, match=r"was saved with (length=8|seed=0)"):
        PromptSource(prompt_at, **other).restore(state)
