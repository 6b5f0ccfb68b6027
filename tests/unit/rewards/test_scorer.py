"""The scorer: one bad rollout never takes others with it; penalties as the papers write them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.data.config import ModelConfig, TaskConfig
from asyncrlhf.data.pretrained import load_tokenizer
from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.config import RewardConfig
from asyncrlhf.rewards.scorer import Scorer, build_scorer, overlong_penalty, preflight
from asyncrlhf.tasks.arithmetic import ArithmeticTask
from asyncrlhf.types import Prompt, Rollout


def rollout(rollout_id: int, text: str, *, length: int = 3, finish: Any = "stop", answer: str | None = "a") -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=0,
        prompt=Prompt("p", f"prompt {rollout_id}", np.array([1]), answer=answer, metadata={"number": rollout_id}),
        response_ids=np.arange(length),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        policy_versions=np.zeros(length, dtype=np.int64),
        finish_reason=finish,
        response_text=text,
        generator_id="g",
    )


def scorer(function: Callable[..., Any], max_length: int = 16, **settings: Any) -> Scorer:
    return Scorer(function, RewardConfig(**settings), max_length)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None, "1.0", "good", [1.0], object()])
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


def test_a_wrong_number_of_scores_is_made_up_for_one_by_one() -> None:
    def drops_the_bad(completions: list[str], **_: Any) -> list[float]:
        return by_length([c for c in completions if c != "bad"])

    results = scorer(drops_the_bad).score([rollout(1, "x"), rollout(2, "bad")])
    assert [r.reward for r in results] == [1.0, None]
    assert results[1].error == "The reward function returned 0 scores for 1 completions."
    (result,) = scorer(lambda **_: 1.0).score([rollout(1, "x")])
    assert result.error == "The reward function returned float, not a list of numbers."


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
    task = ArithmeticTask(TaskConfig(), load_tokenizer(ModelConfig()))
    built = build_scorer(RewardConfig(), task, 16)
    prompt = task.heldout()[0]
    right = rollout(1, str(prompt.answer), answer=prompt.answer)
    wrong = rollout(2, "0", answer=prompt.answer)
    assert [r.reward for r in built.score([right, wrong])] == [1.0, 0.0]
    preflight(built, prompt)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **_: [float("nan")], "returned nan, which is not a finite number"),
        (lambda **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda **_: [1.0, 2.0], "returned 2 scores for 1 completions"),
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
        return [0.0]

    preflight(scorer(function), Prompt("p", "text", np.array([1, 2]), answer=answer))
    assert seen == [probe]
