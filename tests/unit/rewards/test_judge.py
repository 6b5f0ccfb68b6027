"""Generative judges: what they are asked, how a score is read, and an OpenAI-compatible server behind them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards import endpoint as module
from asyncrlhf.rewards.judge import THREADS, ChatEndpoint, JudgeSource, starting_vllm
from asyncrlhf.rewards.reward import ServiceError
from asyncrlhf.rewards.reward_config import HttpConfig, JudgeConfig
from tests.reward_server import serving
from tests.unit.rewards.worlds import rollout


class Says(JudgeSource):
    """A judge who says what it is told to."""

    def __init__(self, config: JudgeConfig, *answers: str | RewardError) -> None:
        super().__init__(config)
        self.answers_ = list(answers)
        self.questions: list[str] = []

    def answers(self, questions: Any) -> list[str | RewardError]:
        self.questions += questions
        return self.answers_


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Clear and right. Score: 8", 8.0),
        ("score:7.5", 7.5),
        ("I first thought Score: 3, but on reflection\nScore: 9.0", 9.0),
        ("Score: 0", 0.0),
        ("Score: 10", 10.0),
        ("Score: 11", "lies outside 0 to 10"),
        ("Score: -1", "lies outside 0 to 10"),
        ("Score: eight", "holds no score"),
        ("8", "holds no score"),
        ("", "holds no score"),
    ],
)
def test_the_last_score_counts_and_anything_else_is_a_failure(answer: str, score: Any) -> None:
    (read,) = Says(JudgeConfig(model="m"), answer).scores([rollout(1, "x")])
    if isinstance(score, float):
        assert read == score
    else:
        assert isinstance(read, RewardError) and score in str(read)


def test_a_group_that_is_no_number_is_a_failure() -> None:
    (read,) = Says(JudgeConfig(model="m", pattern="grade (.*)"), "grade A").scores([rollout(1, "x")])
    assert isinstance(read, RewardError) and "'A' is not a number" in str(read)


@given(text=st.text(), answer=st.none() | st.text())
def test_braces_in_texts_do_not_matter(text: str, answer: str | None) -> None:
    judge = Says(JudgeConfig(model="m", template="{{q}} {prompt}|{response}|{answer}"))
    asked = judge.question(rollout(1, text, prompt=text, answer=answer))
    assert asked == "{q} " + f"{text}|{text}|{answer or ''}"


def test_one_failure_is_one_rollouts_and_a_service_that_fails_all_is_the_services() -> None:
    config = JudgeConfig(model="m")
    mixed = Says(config, "Score: 1", ServiceError("down"), "Score: 2")
    first, second, third = mixed.scores([rollout(i, "x") for i in range(3)])
    assert (first, third) == (1.0, 2.0) and isinstance(second, ServiceError)
    with pytest.raises(ServiceError, match="down"):
        Says(config, ServiceError("down"), ServiceError("down")).scores([rollout(1, "x"), rollout(2, "x")])


def chat(asked: dict[str, Any]) -> Any:
    """Scores by the number of x in the question."""
    text = asked["messages"][0]["content"]
    return {"choices": [{"message": {"role": "assistant", "content": f"Hm. Score: {text.count('x')}"}}]}


def test_a_server_that_speaks_openai_is_asked_one_question_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JudgeConfig(engine="http", model="big-judge", template="{response}", max_tokens=33)
    with serving(chat) as server:
        judge = ChatEndpoint(config, HttpConfig(url=f"{server.url}/v1"), 5.0)
        assert judge.scores([rollout(i, "x" * i) for i in range(6)]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert sorted(d["messages"][0]["content"] for d in server.asked) == ["x" * i for i in range(6)]
        assert set(server.paths) == {"/v1/chat/completions"}
        assert {(d["model"], d["max_tokens"], d["temperature"]) for d in server.asked} == {("big-judge", 33, 0.0)}
        for nonsense in ({"choices": []}, [], {"choices": [{"message": {"content": None}}]}):
            server.answer = lambda _, nonsense=nonsense: nonsense
            (failed,) = judge.scores([rollout(1, "x")])
            assert isinstance(failed, RewardError) and "answered" in str(failed)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    with pytest.raises(ServiceError, match="did not answer"):
        judge.scores([rollout(1, "x")])
    judge.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, r"reward\.judge\.model is empty"),
        ({"engine": "hf"}, r"reward\.judge\.engine=hf is not known"),
        ({"template": "{prompt}"}, r"has no \{response\}"),
        ({"template": "{response} {question}"}, r"names \['question'\]"),
        ({"template": "{response} {"}, "brace without its partner"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "score"}, "has 0 groups"),
        ({"pattern": "(a)(b)"}, "has 2 groups"),
        ({"low": 5, "high": 5}, r"low=5 is not below .*high=5"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        JudgeConfig(**{"model": "m" if settings else "", **settings}).check("reward.judge")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("before", [None, "7"])
@pytest.mark.parametrize(("threads", "workers", "each"), [(4, 2, "2"), (1, 2, "1"), (2, 1, None)])
def test_vllms_workers_share_the_threads_of_their_replica(
    monkeypatch: pytest.MonkeyPatch, before: str | None, threads: int, workers: int, each: str | None
) -> None:
    for name in THREADS:
        monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with starting_vllm("generator.engine=vllm", workers):
        assert [os.environ.get(name) for name in THREADS] == [each or before] * 2
    assert [os.environ.get(name) for name in THREADS] == [before] * 2
