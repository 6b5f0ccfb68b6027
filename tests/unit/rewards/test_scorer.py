"""The scorer: one bad rollout never takes others with it; penalties as the papers write them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.rewards.build_scorer import build_scorer, check_rewards, preflight
from asyncrlhf.rewards.reward import (
    FunctionSource,
    LateServiceError,
    LengthSource,
    RewardSource,
    Score,
    Scorer,
    ServiceError,
    WeightedSource,
    overlong_penalty,
)
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.arithmetic import ArithmeticTask
from asyncrlhf.types import Prompt, Rollout
from tests.unit.rewards.worlds import rollout


def scorer(function: Callable[..., Any], max_length: int = 16, **settings: Any) -> Scorer:
    config = RewardConfig(**settings)
    return Scorer({"score": WeightedSource(FunctionSource(function, config.timeout_seconds))}, config, max_length)


def by_length(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def test_results_carry_the_ids_in_order_in_one_call() -> None:
    calls = []

    def function(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        calls.append((prompts, completions, columns))
        return [0.5, 2, -1.0]

    results = scorer(function).score([rollout(7, "x"), rollout(3, "yy"), rollout(9, "z", length=2, answer=None)])
    assert [(r.rollout_id, r.reward, r.error) for r in results] == [(7, 0.5, None), (3, 2.0, None), (9, -1.0, None)]
    assert calls == [
        (
            ["prompt 7", "prompt 3", "prompt 9"],
            ["x", "yy", "z"],
            {
                "answer": ["a", "a", None],
                "metadata": [{"number": 7}, {"number": 3}, {"number": 9}],
                "completion_ids": [[0, 1, 2], [0, 1, 2], [0, 1]],
            },
        )
    ]
    assert scorer(function).score([]) == []


@pytest.mark.parametrize("wrap", [np.array, torch.tensor, tuple])
def test_arrays_of_scores_are_taken(wrap: Callable[[list[float]], Any]) -> None:
    results = scorer(lambda completions, **_: wrap(by_length(completions))).score([rollout(0, "ab"), rollout(1, "c")])
    assert [r.reward for r in results] == [2.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "1.0", "good", [1.0], object()])
def test_a_bad_value_fails_its_own_rollout(bad: Any) -> None:
    def function(completions: list[str], **_: Any) -> list[Any]:
        return [bad if c == "bad" else 1.0 for c in completions]

    good, failed, last = scorer(function).score([rollout(1, "x"), rollout(2, "bad"), rollout(3, "y")])
    assert (good.reward, last.reward) == (1.0, 1.0)
    assert failed.reward is None and failed.rollout_id == 2
    assert failed.error and "not a finite number" in failed.error


@pytest.mark.parametrize("error", [ValueError("no digits"), KeyError("x"), SystemExit(1)])
def test_one_that_raises_fails_alone(error: BaseException) -> None:
    sizes = []

    def function(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        if "bad" in completions:
            raise error
        return by_length(completions)

    results = scorer(function).score([rollout(1, "x"), rollout(2, "bad"), rollout(3, "yy")])
    assert [r.reward for r in results] == [1.0, None, 2.0]
    assert results[1].error and type(error).__name__ in results[1].error
    assert sizes == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda completions: [1.0], "returned 1 scores for 3 completions"),
        (lambda completions: by_length(completions)[1:], "returned 2 scores for 3 completions"),
        (lambda completions: 1.0, "returned float, not a list of numbers"),
    ],
)
def test_a_function_with_a_wrong_number_of_scores_is_a_bug_after_one_call(
    returned: Callable[..., Any], said: str
) -> None:
    calls = []

    def function(completions: list[str], **_: Any) -> Any:
        calls.append(len(completions))
        return returned(completions)

    with pytest.raises(RewardError, match=f"reward: The reward function {said}. It must return a list with one number"):
        scorer(function).score([rollout(i, "x") for i in range(3)])
    assert calls == [3]


def test_one_that_hangs_on_batches_alone_is_said_and_then_never_given_one() -> None:
    release, calls = threading.Event(), []

    def function(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(completions) > 1:
            release.wait(60)
        return by_length(completions)

    made = scorer(function, timeout_seconds=0.2)
    first = made.score([rollout(i, "x") for i in range(4)])
    second = made.score([rollout(i, "yy") for i in range(4)])
    release.set()
    assert [r.reward for r in first] == [1.0] * 4 and [r.reward for r in second] == [2.0] * 4
    assert calls == [4, 1, 1, 1, 1] + [1] * 4
    ((fault,), *others) = [r.faults for r in first + second]
    assert (fault.part, fault.kind) == ("reward", "late") and not any(others)
    assert fault.cause == (
        "The reward function took longer than reward.timeout_seconds=0.2. "
        "4 rollouts were then scored one by one, as all others will be."
    )


def test_one_bad_rollout_does_not_cost_the_others_their_batches() -> None:
    calls = []

    def function(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        if "bad" in completions:
            raise ValueError("no")
        return by_length(completions)

    made = scorer(function)
    results = made.score([rollout(1, "x"), rollout(2, "bad")])
    assert [(f.kind, f.cause) for r in results for f in r.faults] == [
        ("raised", "The reward function raised ValueError: no 2 rollouts were then scored one by one.")
    ]
    made.score([rollout(3, "x"), rollout(4, "y")])
    assert calls == [2, 1, 1, 2]


def test_one_that_hangs_fails_alone_and_in_time() -> None:
    release = threading.Event()

    def function(completions: list[str], **_: Any) -> list[float]:
        if "hang" in completions:
            release.wait(60)
        return by_length(completions)

    start = time.monotonic()
    results = scorer(function, timeout_seconds=0.1).score([rollout(1, "x"), rollout(2, "hang"), rollout(3, "yy")])
    release.set()
    assert time.monotonic() - start < 30
    assert [r.reward for r in results] == [1.0, None, 2.0]
    assert results[1].error == "The reward function took longer than reward.timeout_seconds=0.1."


def test_penalties_are_parts_that_add_up() -> None:
    guarded = scorer(by_length, max_length=10, missing_eos_penalty=0.5, overlong_buffer=4)
    done, cut = guarded.score([rollout(1, "abc", length=6), rollout(2, "abc", length=9, finish="length")])
    assert done.parts == {"score": 3.0, "missing_eos": 0.0, "overlong": 0.0}
    assert cut.parts == {"score": 3.0, "missing_eos": -0.5, "overlong": -0.75}
    assert (done.reward, cut.reward) == (3.0, 1.75)
    (plain,) = scorer(by_length).score([rollout(1, "abc", finish="length")])
    assert plain.parts == {"score": 3.0}


def test_lengths_are_those_of_sampled_tokens() -> None:
    """An episode's observed tokens cost nothing; a reward function gets all ids, as TRL's do."""
    said, seen = rollout(1, "a", length=9), np.array([0, 0, -1, -1, -1, 0, 0, -1, 0])
    episode, given = replace(said, policy_versions=seen), []
    config = RewardConfig(overlong_buffer=4)
    parts = {"score": WeightedSource(LengthSource()), "own": WeightedSource(FunctionSource(noting_ids(given), 10.0))}
    plain, found = Scorer(parts, config, 10).score([said, episode])
    assert plain.parts == {"score": 9.0, "own": 0.0, "overlong": -0.75}
    assert found.parts == {"score": 5.0, "own": 0.0, "overlong": 0.0}
    assert given == [list(range(9))] * 2


def noting_ids(given: list[list[int]]) -> Callable[..., list[float]]:
    def function(completion_ids: list[list[int]], **_: Any) -> list[float]:
        given.extend(completion_ids)
        return [0.0] * len(completion_ids)

    return function


def test_overlong_penalty_is_the_papers() -> None:
    """Equation 13 of 2503.14476, written as its three cases."""
    longest, cache = 20, 5
    for length in range(1, 25):
        if length <= longest - cache:
            expected = 0.0
        elif length <= longest:
            expected = ((longest - cache) - length) / cache
        else:
            expected = -1.0
        assert overlong_penalty(length, longest, cache) == pytest.approx(expected)


def test_a_reward_function_of_trl_works_as_it_is_and_agrees() -> None:
    rewards = pytest.importorskip("trl.rewards")
    rollouts = [rollout(length, "x", length=length) for length in range(1, 21)]
    theirs = scorer(rewards.get_soft_overlong_punishment(20, 5)).score(rollouts)
    ours = scorer(lambda completions, **_: [0.0] * len(completions), max_length=20, overlong_buffer=5).score(rollouts)
    assert [r.reward for r in ours] == pytest.approx([r.reward for r in theirs])
    assert min(r.reward for r in theirs if r.reward is not None) == -1.0


def test_an_overlong_buffer_wider_than_a_response_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlong_buffer=17 .* at most generator\.max_completion_length=16"):
        scorer(by_length, overlong_buffer=17)


def test_the_task_rule_is_a_reward_function_like_any_other() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    task = ArithmeticTask(TaskConfig(), tokenizer)
    built = build_scorer(RewardConfig(), tokenizer, lambda: task, 16)
    prompt = task.heldout()[0]
    right = rollout(1, str(prompt.answer), answer=prompt.answer)
    wrong = rollout(2, "0", answer=prompt.answer)
    assert [r.reward for r in built.score([right, wrong])] == [1.0, 0.0]
    preflight(built, prompt)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **_: [float("nan")] * 2, "returned nan, which is not a finite number"),
        (lambda **_: [1e300] * 2, r"returned 1e\+300; allowed: numbers from -1e\+09 to 1e\+09"),  # inf in float32
        (lambda **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda **_: [1.0], "returned 1 scores for 2 completions"),
        (lambda **_: 1.0, "returned float, not a list of numbers"),
    ],
)
def test_preflight_refuses_a_function_without_a_score(function: Callable[..., Any], message: str) -> None:
    prompt = Prompt("p", "text", np.array([1, 2]), answer=None)
    with pytest.raises(ConfigError, match=rf"reward\.kind=python reward\.target=a:b gives no score .*{message}"):
        preflight(scorer(function, kind="python", target="a:b"), prompt)


@pytest.mark.parametrize(("answer", "probe"), [("42", "42"), (None, "text")])
def test_preflight_probes_with_the_reference_answer_or_the_text(answer: str | None, probe: str) -> None:
    seen = []

    def function(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    preflight(scorer(function), Prompt("p", "text", np.array([1, 2]), answer=answer))
    assert seen == [probe, probe]


class Fixed(RewardSource):
    """A source with one score or failure a rollout id; remembers what it was asked."""

    def __init__(self, scores: dict[int, Score], whole: RewardError | None = None) -> None:
        self.by_id = scores
        self.whole = whole
        self.asked: list[list[int]] = []
        self.closed = False

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.asked.append([r.rollout_id for r in rollouts])
        if self.whole is not None:
            raise self.whole
        return [self.by_id[r.rollout_id] for r in rollouts]

    def close(self) -> None:
        self.closed = True


def a_sum(**sources: tuple[float, Fixed]) -> Scorer:
    parts = {name: {"kind": "task", "weight": weight} for name, (weight, _) in sources.items()}
    config = RewardConfig(kind="sum", parts=parts, missing_eos_penalty=0.25)
    weighted = {name: WeightedSource(source, weight) for name, (weight, source) in sources.items()}
    return Scorer(weighted, config, 16)


def test_a_sum_is_weighted_and_shows_each_part_as_it_was_scored() -> None:
    one, two = Fixed({1: 2.0, 2: -1.0}), Fixed({1: 10.0, 2: 4.0})
    both = a_sum(helpful=(0.5, one), length=(-0.1, two))
    first, second = both.score([rollout(1, "x"), rollout(2, "y", finish="length")])
    assert first.parts == {"helpful": 2.0, "length": 10.0, "missing_eos": 0.0}
    assert first.reward == pytest.approx(0.5 * 2.0 - 0.1 * 10.0)
    assert second.reward == pytest.approx(-0.5 - 0.4 - 0.25)
    both.close()
    assert one.closed and two.closed


def test_a_rollout_that_one_part_fails_has_no_reward_and_costs_the_other_parts_nothing() -> None:
    cheap, dear = Fixed({1: 1.0, 2: RewardError("too long"), 3: 1.0}), Fixed({1: 5.0, 3: RewardError("no number")})
    results = a_sum(cheap=(1.0, cheap), dear=(1.0, dear)).score([rollout(i, "x") for i in (1, 2, 3)])
    assert [r.reward for r in results] == [6.0, None, None]
    assert results[1].error == "reward.parts.cheap: too long"
    assert results[2].error == "reward.parts.dear: no number"
    assert dear.asked == [[1, 3]]


def test_a_service_that_is_down_is_not_asked_for_each_rollout_again() -> None:
    down, odd = Fixed({}, ServiceError("nobody answers")), Fixed({}, RewardError("a wrong number of scores"))
    assert [r.error for r in a_sum(a=(1.0, down)).score([rollout(1, "x"), rollout(2, "y")])] == [
        "reward.parts.a: nobody answers"
    ] * 2
    assert down.asked == [[1, 2]]
    a_sum(a=(1.0, odd)).score([rollout(1, "x"), rollout(2, "y")])
    assert odd.asked == [[1, 2], [1], [2]]
    late = Fixed({}, LateServiceError("nobody answers in time"))
    a_sum(a=(1.0, late)).score([rollout(i, "x") for i in range(9)])
    assert late.asked == [list(range(9)), [0]], "one more call says whether it is down"


def test_a_sum_is_built_from_its_settings() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    task = ArithmeticTask(TaskConfig(), tokenizer)
    parts = {
        "rule": {},
        "short": {"kind": "length", "weight": -0.5},
        "mine": {"kind": "python", "target": "tests.reward_functions:obeys", "weight": 2},
    }
    config = RewardConfig(kind="sum", parts=parts)
    prompt = task.heldout()[0]
    check_rewards(config, tokenizer, lambda: task, 16, prompt)
    built = build_scorer(config, tokenizer, lambda: task, 16)
    text = str(prompt.answer)
    (result,) = built.score([rollout(1, text, answer=prompt.answer, length=5)])
    built.close()
    assert result.parts == {"rule": 1.0, "short": 5.0, "mine": float(len(text))}
    assert result.reward == 1.0 - 2.5 + 2.0 * len(text)


def test_a_part_that_cannot_be_built_closes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrlhf.rewards import build_scorer as building

    first = Fixed({})
    monkeypatch.setattr(building, "LengthSource", lambda: first)
    parts = {"a": {"kind": "length"}, "b": {"kind": "python", "target": "tests.reward_functions:nobody"}}
    with pytest.raises(ConfigError, match=r"reward\.parts\.b\.target=tests\.reward_functions:nobody.* has no 'nobody'"):
        build_scorer(RewardConfig(kind="sum", parts=parts), load_tokenizer(ModelConfig()), lambda: None, 16)  # type: ignore
    assert first.closed
