"""The contract that every generation engine keeps; engines of one kind are checked further in tests/unit/engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from asyncrlhf.engines.engine import Engine
from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.engines.generator_config import FakeConfig
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationFailure, GenerationRequest, Prompt, Rollout, SamplingParams
from tests.numeric import FLOAT32, assert_close
from tests.vllm_tiny import VOCABULARY, TinyVllm, needs_vllm, tiny_model

EOS = 1
MakeEngine = Callable[[int], Engine]


@pytest.fixture(scope="module")
def tiny_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyVllm]:
    running = TinyVllm(tmp_path_factory.mktemp("tiny"))
    yield running
    running.close()


@pytest.fixture(params=["fake", "hf", pytest.param("vllm", marks=needs_vllm)])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    if request.param == "vllm":
        running: TinyVllm = request.getfixturevalue("tiny_vllm")
        return running.engine

    def make(slots: int) -> Engine:
        if request.param == "fake":
            config = FakeConfig(latency_median=1.0, latency_sigma=0.7, length_mean=6.0)
            return FakeEngine(config, slots=slots, vocab_size=VOCABULARY)
        return HFEngine(tiny_model(), slots=slots)

    return make


def make_requests(count: int, *, first: int = 0, longest: int = 10, stops: tuple[int, ...] = (EOS,)) -> list:
    rng = np.random.default_rng(first)
    sampling = SamplingParams(max_completion_length=longest, stop_token_ids=stops)
    return [
        GenerationRequest(
            rollout_id=i,
            group_id=i // 4,
            prompt=Prompt("", "", np.random.default_rng(i // 4).integers(2, VOCABULARY, 1 + (i // 4) % 7)),
            seed=int(rng.integers(2**62)),
            sampling=sampling,
        )
        for i in range(first, first + count)
    ]


class Clock:
    """Steps an engine the way a runtime does: on to ``wake_at`` when it is given, else by a tenth of a second."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.now, self.tokens = engine, 0.0, 0

    def step(self, small: bool = False) -> list[Rollout | GenerationFailure]:
        output = self.engine.step(self.now)
        self.tokens += output.tokens
        self.now = self.now + 0.1 if small or output.wake_at is None else output.wake_at
        return output.finished

    def drain(self, limit: int = 2000) -> dict[int, Rollout]:
        done: dict[int, Rollout] = {}
        for _ in range(limit):
            for result in self.step():
                assert isinstance(result, Rollout), result
                assert result.rollout_id not in done
                done[result.rollout_id] = result
            if not self.engine.in_flight():
                return done
        raise AssertionError(f"not finished after {limit} steps: {self.engine.in_flight()}")


def check_result(result: Rollout, longest: int, version: int) -> None:
    length = len(result.response_ids)
    assert 1 <= length <= longest
    assert len(result.behavior_logprobs) == len(result.policy_versions) == length
    assert result.response_ids.dtype == np.int64 and result.behavior_logprobs.dtype == np.float32
    assert result.response_ids.min() >= 0 and result.response_ids.max() < VOCABULARY
    assert np.isfinite(result.behavior_logprobs).all() and (result.behavior_logprobs <= 0).all()
    assert (result.policy_versions == version).all()
    assert EOS not in result.response_ids[:-1]
    assert (result.response_ids[-1] == EOS) == (result.finish_reason == "stop")
    assert result.finish_reason == "stop" or length == longest


def test_every_request_comes_back_once_though_slots_are_few_and_others_run(make_engine: MakeEngine) -> None:
    """Some of them arrive while others run; every sampled token is counted."""
    engine = make_engine(3)
    clock = Clock(engine)
    engine.submit(make_requests(9))
    with pytest.raises(ValueError, match="rollout 0"):
        engine.submit(make_requests(1))
    done = {result.rollout_id: result for result in clock.step(small=True)}
    engine.submit(make_requests(8, first=9))
    assert engine.in_flight() == [i for i in range(17) if i not in done]
    done |= clock.drain()
    assert sorted(done) == list(range(17))
    for result in done.values():
        check_result(result, longest=10, version=0)
    assert clock.tokens == sum(len(result.response_ids) for result in done.values())
    assert engine.in_flight() == []
    assert engine.step(1e6).finished == []


def test_cancel_forgets_running_and_waiting_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(2)
    clock = Clock(engine)
    requests = make_requests(8)
    engine.submit(requests)
    finished = {result.rollout_id for result in clock.step(small=True)}
    running, waiting = engine.in_flight()[0], engine.in_flight()[-1]
    assert engine.cancel([running, waiting, 99, running]) == [running, waiting]
    assert running not in engine.in_flight() and waiting not in engine.in_flight()
    finished |= set(clock.drain())
    assert finished == set(range(8)) - {running, waiting}
    engine.submit([requests[running]])
    assert set(clock.drain()) == {running}


def test_cancelling_others_leaves_a_result_as_it_was(make_engine: MakeEngine) -> None:
    requests = make_requests(6, longest=16, stops=())
    whole = make_engine(6)
    whole.submit(requests)
    expected = Clock(whole).drain()
    engine = make_engine(6)
    clock = Clock(engine)
    engine.submit(requests)
    early = {result.rollout_id: result for result in clock.step(small=True)}
    engine.cancel([0, 2, 3])
    for rollout_id, result in {**early, **clock.drain()}.items():
        np.testing.assert_array_equal(result.response_ids, expected[rollout_id].response_ids)
        assert_close(result.behavior_logprobs, expected[rollout_id].behavior_logprobs, atol=FLOAT32)


def test_a_sleeping_engine_takes_calls_and_goes_on_after_the_wake(make_engine: MakeEngine) -> None:
    requests = make_requests(6, longest=14, stops=())
    engine = make_engine(4)
    text = [np.arange(2, 12)]
    before = engine.score(text)[0]
    clock = Clock(engine)
    engine.submit(requests[:5])
    done = {result.rollout_id: result for _ in range(3) for result in clock.step(small=True)}
    engine.sleep()
    engine.sleep()
    assert engine.asleep
    engine.submit(requests[5:])
    engine.load_weights(7, engine.parameters(), "keep")
    engine.load_weights(8, engine.parameters(), "recompute")
    assert_close(engine.score(text)[0], before, atol=FLOAT32)
    in_flight = engine.in_flight()
    assert set(in_flight) | set(done) == set(range(6))
    for _ in range(5):
        assert engine.step(clock.now).finished == []
        clock.now += 50.0
    engine.wake()
    engine.wake()
    assert not engine.asleep and engine.in_flight() == in_flight
    done |= clock.drain()
    whole = make_engine(4)
    whole.submit(requests)
    for rollout_id, result in Clock(whole).drain().items():
        np.testing.assert_array_equal(result.response_ids, done[rollout_id].response_ids)
        assert_close(result.behavior_logprobs, done[rollout_id].behavior_logprobs, atol=FLOAT32)
    assert {version for result in done.values() for version in result.policy_versions.tolist()} == {0, 8}
    assert set(done[5].policy_versions.tolist()) == {8}


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_tags_change_exactly_at_the_load(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(4)
    clock = Clock(engine)
    engine.submit(make_requests(4, longest=12, stops=()))
    made_before = sum(engine.step(clock.now + i * 0.1).tokens for i in range(3))
    clock.now += 0.2
    engine.load_weights(7, engine.parameters(), cache)
    assert engine.version == 7
    done = clock.drain()
    versions = [result.policy_versions for result in done.values()]
    assert sum(int((tags == 0).sum()) for tags in versions) == made_before
    for tags in versions:
        assert set(tags.tolist()) <= {0, 7} and (np.diff(tags) >= 0).all()
    assert any(set(tags.tolist()) == {0, 7} for tags in versions)


def test_a_result_does_not_depend_on_its_company(make_engine: MakeEngine) -> None:
    requests = make_requests(24, longest=14)
    company = make_engine(5)
    company.submit(requests)
    together = Clock(company).drain()
    alone = make_engine(1)
    for request in requests[::3]:
        alone.submit([request])
        result = Clock(alone).drain()[request.rollout_id]
        other = together[request.rollout_id]
        np.testing.assert_array_equal(result.response_ids, other.response_ids)
        assert_close(result.behavior_logprobs, other.behavior_logprobs, atol=FLOAT32)
        assert result.finish_reason == other.finish_reason


def test_seeds_decide_the_draws(make_engine: MakeEngine) -> None:
    request = make_requests(1, longest=16, stops=())[0]

    def respond(seed: int) -> list[int]:
        engine = make_engine(1)
        engine.submit([GenerationRequest(0, 0, request.prompt, seed, request.sampling)])
        return Clock(engine).drain()[0].response_ids.tolist()

    assert respond(5) == respond(5)
    assert len({tuple(respond(seed)) for seed in range(8)}) == 8


def test_score_gives_one_logprob_less_than_tokens_and_close_forgets_everything(make_engine: MakeEngine) -> None:
    texts: Sequence[np.ndarray] = [np.arange(2, 9), np.array([3]), np.arange(4, 6), np.zeros(0, np.int64)]
    engine = make_engine(2)
    scores = engine.score(texts)
    assert [len(score) for score in scores] == [6, 0, 1, 0]
    assert all(score.dtype == np.float32 for score in scores)
    engine.submit(make_requests(5))
    engine.step(0.0)
    engine.close()
    assert engine.in_flight() == []


def test_what_was_sampled_so_far_is_the_beginning_of_what_comes_back(make_engine: MakeEngine) -> None:
    """Pieces of at least three tokens, of those that were asked for alone; together they are the response's head."""
    engine = make_engine(3)
    clock = Clock(engine)
    engine.submit(make_requests(6, stops=()))
    seen = dict.fromkeys(range(5), 0)
    heads: dict[int, list[int]] = {i: [] for i in range(6)}
    done: dict[int, Rollout] = {}
    for _ in range(2000):
        for result in clock.step(small=True):
            assert isinstance(result, Rollout)
            done[result.rollout_id] = result
        for rollout_id, ids in engine.partial(seen, 3).items():
            assert len(ids) >= 3 and rollout_id in engine.in_flight()
            heads[rollout_id] += ids.tolist()
            seen[rollout_id] += len(ids)
        if not engine.in_flight():
            break
    assert sorted(done) == list(range(6)) and engine.partial(seen, 1) == {}
    assert heads[5] == [], "nobody asked"
    for rollout_id, head in heads.items():
        assert head == done[rollout_id].response_ids[: len(head)].tolist()
    assert sum(map(len, heads.values())) >= 9
