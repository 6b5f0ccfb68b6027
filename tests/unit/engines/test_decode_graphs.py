"""Decode iterations as graphs give what they give without, whatever happens between two replays; on a CPU by a stand-in
for CUDA's graphs that knows addresses, as these do."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from asyncrlhf.engines.hf import decode_graphs
from asyncrlhf.engines.hf.decode_graphs import Pass, rounded_places, rounded_rows
from asyncrlhf.engines.hf.forward import LeanForward, SlotPasses
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.unit.engines.test_kept_cache import MODELS, VOCABULARY, Schedule, make_engine, requests

Capture = Callable[[Pass], tuple[Callable[[], None], torch.Tensor]]


class StandIn:
    """Runs a pass again in place of a replay, if everything that it reads is where it was."""

    def __init__(self) -> None:
        self.engine: HFEngine | None = None
        self.captures = self.replays = 0

    def addresses(self) -> list[int]:
        assert self.engine is not None
        passes = self.engine._passes
        assert isinstance(passes, SlotPasses)
        tensors = [x for group in passes.groups for x in (group._keys, group._values)]
        return [x.data_ptr() for x in (*tensors, *self.engine._model.parameters())]

    def capturer(self) -> Capture:
        return self.capture

    def capture(self, run: Pass) -> tuple[Callable[[], None], torch.Tensor]:
        self.captures += 1
        captured, logits = self.addresses(), run()

        def replay() -> None:
            assert self.addresses() == captured, "a graph would read or write memory that is another's now"
            self.replays += 1
            logits.copy_(run())

        return replay, logits


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(decode_graphs, "cuda_capture", made.capturer)
    return made


def with_graphs(engine: HFEngine, stand_in: StandIn) -> HFEngine:
    engine._passes = SlotPasses(engine._model, engine.slots, graphs=True)
    stand_in.engine = engine
    return engine


def graphs(engine: HFEngine) -> decode_graphs.DecodeGraphs:
    assert isinstance(engine._passes, SlotPasses) and engine._passes.graphs is not None
    return engine._passes.graphs


def late_sibling(engine: HFEngine) -> list[int]:
    """The tokens of a request whose prompt is kept by a row that holds no request, beyond five that are busy."""
    prompts = [Prompt("", "", np.arange(i + 1, i + 8)) for i in range(6)]
    lengths = [30, 30, 30, 30, 30, 2]
    engine.submit([GenerationRequest(i, i, prompts[i], i, SamplingParams(lengths[i])) for i in range(6)])
    for _ in range(12):
        engine.step(0.0)
    assert engine._table.count == 5
    engine.submit([GenerationRequest(6, 5, prompts[5], 6, SamplingParams(20))])
    done: dict[int, Rollout] = {}
    while engine.in_flight():
        done |= {x.rollout_id: x for x in engine.step(0.0).finished if isinstance(x, Rollout)}
    return done[6].response_ids.tolist()


def test_rows_that_fill_a_graph_up_keep_their_prompts(stand_in: StandIn) -> None:
    engine = with_graphs(make_engine("llama", None, slots=8), stand_in)
    ours = late_sibling(engine)
    assert (6, 64) in graphs(engine)._graphs or (6, engine._passes.capacity) in graphs(engine)._graphs
    assert ours == late_sibling(make_engine("llama", None, slots=8))


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.more_but("0")
@pytest.mark.thorough_but("1")
def test_rows_with_graphs_are_those_without(name: str, seed: int, stand_in: StandIn) -> None:
    """Amid joins, moves, shared prompts, loads and sleeps; also of layers with a window, whose rows are rings."""
    ours, theirs = (Schedule(make_engine(name, None), name, seed) for _ in range(2))
    with_graphs(ours.engine, stand_in)
    asked = requests(seed, prompts=8, siblings=3, temperature=0.7)
    with mock.patch.object(decode_graphs, "SIGHTINGS", 1):
        got = ours.run(asked, 0.05)
    expected = theirs.run(asked, 0.05)
    assert stand_in.replays > 3 * stand_in.captures > 0 and not graphs(ours.engine).reason
    assert got.keys() == expected.keys()
    for number, rollout in expected.items():
        assert got[number].response_ids.tolist() == rollout.response_ids.tolist()
        assert got[number].policy_versions.tolist() == rollout.policy_versions.tolist()
        np.testing.assert_allclose(got[number].behavior_logprobs, rollout.behavior_logprobs, atol=2e-4)


def finish(engine: HFEngine, count: int, prompt: int = 5, length: int = 20) -> list[Rollout]:
    rng = np.random.default_rng(prompt)
    sampling = SamplingParams(length)
    first = engine.version
    engine.submit([
        GenerationRequest(100 * prompt + i, i, Prompt("", "", rng.integers(1, VOCABULARY, prompt)), i, sampling)
        for i in range(count)
    ])  # fmt: skip
    done: list[Rollout] = []
    while engine.in_flight():
        done += [x for x in engine.step(0.0).finished if isinstance(x, Rollout)]
    assert len(done) == count and engine.version == first
    return done


def test_a_shape_is_captured_when_it_comes_again_and_kept_while_the_memory_is(stand_in: StandIn) -> None:
    engine = with_graphs(make_engine("llama", None), stand_in)
    finish(engine, 5)
    assert stand_in.captures == len(graphs(engine)) == 1
    finish(engine, 5)
    assert stand_in.captures == 1, "the same shape once more"
    finish(engine, 5, prompt=30, length=60)  # the cache grows
    assert len(graphs(engine)) == 2, "of the new cache alone: up to 64 places, and more"
    engine.sleep()
    assert len(graphs(engine)) == 0
    engine.wake()
    assert finish(engine, 5)


def test_the_table_of_a_graph_outlives_a_longer_text(stand_in: StandIn) -> None:
    """A graph goes on reading the rotary table that was there when it was captured."""
    engine = with_graphs(make_engine("llama", None), stand_in)
    finish(engine, 5)
    forward = graphs(engine)._forward
    assert isinstance(forward, LeanForward)
    table = forward._rotary
    engine.score([np.ones(4 * len(table), np.int64)])
    assert forward._rotary is not table
    assert all(graph.held[0] is table for graph in graphs(engine)._graphs.values())


def test_a_pass_that_cannot_be_captured_goes_on_without(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Pass) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(stand_in, "capture", refuse)
    engine = with_graphs(make_engine("llama", None), stand_in)
    with pytest.warns(UserWarning, match="without CUDA graphs: its pass cannot be captured .CUDA error: operation"):
        first = finish(engine, 5)
    assert [x.response_ids.tolist() for x in finish(engine, 5)] == [x.response_ids.tolist() for x in first]


def test_a_graph_that_computes_something_else_is_not_used(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    right = stand_in.capture

    def wrong(run: Pass) -> tuple[Callable[[], None], torch.Tensor]:
        return right(lambda: run().roll(1, dims=1))

    monkeypatch.setattr(stand_in, "capture", wrong)
    engine = with_graphs(make_engine("llama", None), stand_in)
    with pytest.warns(UserWarning, match="without CUDA graphs: the graph's logits differ by "):
        got = finish(engine, 5)
    plain = finish(make_engine("llama", None), 5)
    assert [x.response_ids.tolist() for x in got] == [x.response_ids.tolist() for x in plain]


def test_few_shapes_cover_all_numbers_of_rows_and_places() -> None:
    assert sorted({rounded_rows(n, 60) for n in range(1, 61)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60]
    assert all(n <= rounded_rows(n, 60) <= 1.5 * n for n in range(1, 61))
    assert sorted({rounded_places(n, 1000) for n in range(1, 1001)}) == [64, 128, 256, 512, 1000]
    assert all(n <= rounded_places(n, 1000) for n in range(1, 1001))
