"""The lengths that ``bench fusion`` forces: long-tailed, and those that the engine then makes."""

from __future__ import annotations

import asyncio
import importlib
from statistics import median
from typing import Any

import numpy as np
import pytest

from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.vllm_tiny import tiny_model

bench = importlib.import_module("experiments.19_fusion.bench")


@pytest.mark.parametrize(("count", "middle", "ratio"), [(32, 48, 20.0), (31, 10, 50.0), (2, 5, 3.0)])
def test_the_longest_is_so_many_medians_long(count: int, middle: int, ratio: float) -> None:
    lengths = bench.tailed_lengths(count, middle, ratio)
    assert len(lengths) == count and lengths == sorted(lengths) and lengths[0] >= 1
    assert max(lengths) == round(middle * ratio)
    if count > 2:
        assert median(lengths) == pytest.approx(middle, rel=0.2)
        assert sum(lengths) / count > 1.3 * middle, "a long tail"


def test_responses_have_the_lengths_that_were_drawn() -> None:
    engine = HFEngine(tiny_model(), slots=3)

    class Handle:
        name = "g"

        async def submit(self, items: Any) -> None:
            engine.submit(items)

    lengths = [3, 9, 1]
    sampling = SamplingParams(max_completion_length=9, stop_token_ids=tuple(range(2, 10)))
    prompt = Prompt("p", "p", np.arange(2, 5))
    items = [GenerationRequest(i, i, prompt, i, sampling) for i in range(3)]
    tailed = bench._Tailed(Handle(), lengths)  # type: ignore[arg-type]
    assert tailed.name == "g"
    asyncio.run(tailed.submit(items))
    done: dict[int, int] = {}
    while engine.in_flight():
        for result in engine.step(0.0).finished:
            assert isinstance(result, Rollout)
            done[result.rollout_id] = len(result.response_ids)
    assert [done[i] for i in range(3)] == lengths
