"""Reward functions as TRL calls them: columns by name, messages, ``async``, None, weights, TRL's own ones unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.guard import CallLog, call_function
from asyncrlhf.rewards.reward import NO_OPINION, Scorer, WeightedSource, columns_of
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.rewards.sandbox import SandboxSource
from asyncrlhf.types import Rollout
from tests.unit.rewards.worlds import rollout


def talk(rollout_id: int, text: str, **columns: Any) -> Rollout:
    """A rollout of a conversational dataset with these columns."""
    made = rollout(rollout_id, text, metadata=columns)
    messages = [{"role": "user", "content": made.prompt.text}]
    return replace(made, prompt=replace(made.prompt, messages=messages))


def test_a_function_gets_every_column_and_the_form_of_its_dataset() -> None:
    one = rollout(1, "x", metadata={"solution": "7", "level": 2})
    two = replace(rollout(2, "y", metadata={"solution": "8", "answer": 8}), policy_versions=np.array([3, 4, 4]))
    columns = columns_of([one, two])
    assert columns["solution"] == ["7", "8"] and columns["level"] == [2, None]
    assert columns["answer"] == [None, 8], "a dataset's own column of a name of ours is handed over as it is"
    assert columns["completions"] == ["x", "y"] and columns["prompts"] == ["prompt 1", "prompt 2"]
    assert columns["trainer_state"].global_step == 4
    spoken = columns_of([talk(1, "x", solution="7", prompt="no", completions="no")])
    assert spoken["prompts"] == [[{"role": "user", "content": "prompt 1"}]]
    assert spoken["completions"] == [[{"role": "assistant", "content": "x"}]]
    assert "prompt" not in spoken


def test_async_functions_share_one_loop_and_none_is_no_opinion() -> None:
    loops = []

    async def judge(completions: list[str], **columns: Any) -> list[float | None]:
        import asyncio

        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [None if c == "?" else float(len(c)) for c in completions]

    class Judge:
        async def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
            return await judge(completions)

    for function in (judge, Judge()):
        assert call_function(function, {"prompts": ["p"] * 2, "completions": ["?", "ab"]}) == [None, 2.0]
    assert loops[0] is loops[1], "a client that a function keeps would die with its loop"


def test_what_a_function_lacks_is_named() -> None:
    def wants(completions: list[str], images: list[Any], **columns: Any) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match=r"the columns solution \(missing a required argument: 'images'\)"):
        call_function(wants, {"prompts": ["p"], "completions": ["c"], "solution": ["s"]})


def weighed(**settings: Any) -> Scorer:
    """The functions of tests/trl_script.py, in this process."""
    from asyncrlhf.plugins import load_function
    from asyncrlhf.rewards.reward import FunctionSource, Score

    class Direct(FunctionSource):
        def scores(self, rollouts: Any) -> list[Score]:
            return call_function(self._function, columns_of(rollouts))

    config = RewardConfig(kind="python", **settings)
    parts = config.sources.items()
    return Scorer(
        {name: WeightedSource(Direct(load_function("t", part.target), 1.0), part.weight) for name, part in parts},
        config,
        16,
    )


def test_weights_act_and_a_part_without_an_opinion_adds_nothing() -> None:
    functions = ["tests.trl_script:accuracy_reward", "tests.trl_script:brevity_reward"]
    made = weighed(reward_funcs=functions, reward_weights=[2.0, 0.5])
    told = [talk(1, "12", solution="12", level=14), talk(2, "7", solution="7", level=10)]
    results = made.score([*told, talk(3, "1", solution="12", level=14)])
    assert [r.reward for r in results] == pytest.approx([2.0 - 0.5 * 0.2, 2.0, -0.5 * 0.1])
    assert [dict(r.parts) for r in results] == [
        {"accuracy_reward": 1.0, "brevity_reward": -0.2},
        {"accuracy_reward": 1.0},
        {"accuracy_reward": 0.0, "brevity_reward": -0.1},
    ]


def test_no_opinion_at_all_is_neither_zero_nor_a_failure() -> None:
    made = weighed(
        reward_funcs=["tests.reward_functions:no_opinion_of_odd_sums", "tests.reward_functions:never_an_opinion"]
    )
    odd, even = made.score([talk(1, "12", solution="3"), talk(2, "12", solution="4")])
    assert (odd.reward, odd.error, odd.abstained) == (None, NO_OPINION, True)
    assert (even.reward, even.abstained) == (2.0, False)


def test_what_functions_log_is_that_of_their_call_and_bounded() -> None:
    log = CallLog(2)

    def logs(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        for value in (1.0, 2.0, float("nan")):
            log_metric("a share/of all", value)
        log_extra("parsed", ["x" * 5000, 3])
        return [0.0, 1.0]

    arguments = {"prompts": ["p"] * 2, "completions": ["?", "ab"]}
    assert call_function(logs, arguments, log) == [0.0, 1.0]
    assert log.metrics == {"a_share_of_all": 1.5}, "NaN is no figure"
    assert log.extras == [{"parsed": "x" * 1000}, {"parsed": 3}]

    def refused(wrong: Any) -> str:
        with pytest.raises(RewardError) as found:
            call_function(lambda log_metric, log_extra, **_: [wrong(log_metric, log_extra)], arguments, CallLog(2))
        return str(found.value)

    assert "log_extra('parsed') got 1 values for 2 completions" in refused(lambda metric, extra: extra("parsed", [1]))
    many = refused(lambda metric, extra: [metric(f"m{n}", 0.0) for n in range(33)])
    assert "log_metric takes at most 32 names per call" in many
    assert "at most 8 columns" in refused(lambda metric, extra: [extra(f"c{n}", [0, 0]) for n in range(9)])


def test_what_several_functions_log_travels_with_each_rollouts_answer() -> None:
    made = SandboxSource("tests.trl_script:accuracy_reward", "reward.target", 30.0)
    other = SandboxSource("tests.reward_functions:logs_its_length", "reward.target", 30.0)
    try:
        scorer = Scorer({"a": WeightedSource(made), "b": WeightedSource(other)}, RewardConfig(), 16)
        first, second = scorer.score([talk(1, "12", solution="12"), talk(2, "7", solution="8")])
        (alone,) = scorer.score([talk(3, "7", solution="7")])
    finally:
        scorer.close()
    assert first.logged == second.logged == {"accuracy": pytest.approx((0.5 + 1.5) / 2), "length": 1.5}
    assert json.loads(first.extra) == {"golden_answer": "12", "length": 2}
    assert json.loads(second.extra) == {"golden_answer": "8", "length": 1}
    assert alone.logged == {"accuracy": 1.0, "length": 1.0} and json.loads(alone.extra)["golden_answer"] == "7"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "task", "reward_funcs": ["a:f"]}, "needs reward.kind=python"),
        ({"reward_funcs": ["a:f"], "target": "a:g"}, "both name functions"),
        ({"reward_funcs": ["a:f", "a:g"], "reward_weights": [1.0]}, "has 1 weights for the 2 functions"),
        ({"reward_funcs": ["f"]}, "reward_funcs=f is not of the form"),
        ({"reward_funcs": ["a:f", "a:f"]}, "names a:f twice"),
        ({}, "needs reward.target"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardConfig(**{"kind": "python", **settings})


def test_functions_of_one_name_go_by_their_modules() -> None:
    config = RewardConfig(kind="python", reward_funcs=["a:f", "b:f", "b:g", "b:overlong"])
    assert list(config.sources) == ["a:f", "b:f", "g", "b:overlong"]


def test_trls_own_accuracy_reward_unchanged() -> None:
    pytest.importorskip("math_verify")
    source = SandboxSource("trl.rewards:accuracy_reward", "reward.target", 30.0)
    try:
        scorer = Scorer({"score": WeightedSource(source)}, RewardConfig(kind="python", target="a:f"), 16)
        results = scorer.score(
            [
                talk(1, r"So it is \boxed{\frac{1}{3}}", solution=r"\frac{1}{3}"),
                talk(2, r"So it is \boxed{\frac{1}{2}}", solution=r"\frac{1}{3}"),
                talk(3, r"So it is \boxed{5}", solution="no formula at all"),
            ]
        )
    finally:
        source.close()
    assert [r.reward for r in results] == [1.0, 0.0, None]
    assert results[2].abstained
