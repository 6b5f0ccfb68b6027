"""Agents play episodes over the endpoint: OpenAI's client, a real socket, and a sampler whose tokens are known."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from asyncrlhf.episodes.agents.harness import AgentDriver
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.environment import EpisodeError
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import OBSERVED, GenerationRequest, Prompt, Rollout, SamplingParams
from tests import agents
from tests.chat_tokens import chat_tokenizer

TOKENS = chat_tokenizer()
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
USER = {"role": "user", "content": "What is 2+3?"}
NOT_CONTINUED = "does not continue the episode"
PROGRAM = f"{sys.executable} -m tests.agent_program"


def ids(text: str) -> list[int]:
    return list(TOKENS(text, add_special_tokens=False).input_ids)


class Sampler:
    """Answers with the given texts in turn, each cut at the length asked for, and then again with the last one."""

    def __init__(self, *texts: str, seconds: float = 0.0) -> None:
        self.texts, self.seconds = texts, seconds
        self.asked: list[GenerationRequest] = []
        self.turns: list[Rollout] = []

    async def __call__(self, request: GenerationRequest) -> Rollout:
        number = len(self.asked)
        self.asked.append(request)
        await asyncio.sleep(self.seconds)
        text = self.texts[min(number, len(self.texts) - 1)]
        made, most = ids(text), request.sampling.max_completion_length
        for stop in request.sampling.stop:
            if stop in text:
                made = ids(text[: text.index(stop) + len(stop)])
        cut = np.array(made[:most], np.int64)
        turn = Rollout(
            request.rollout_id,
            request.group_id,
            request.prompt,
            response_ids=cut,
            behavior_logprobs=-0.25 * np.arange(1, len(cut) + 1, dtype=np.float32),
            policy_versions=np.full(len(cut), number, np.int64),
            finish_reason="stop" if len(made) <= most else "length",
            response_text=str(TOKENS.decode(cut)),
            generator_id="generator-0",
        )
        self.turns.append(turn)
        return turn


def asked(text: str = "What is 2+3?", most: int = 400, number: int = 7) -> GenerationRequest:
    prompt = Prompt("p", text, np.array(ids(text)), answer="5", metadata={"level": 3})
    return GenerationRequest(
        number, 1, prompt, seed=11, sampling=SamplingParams(most, temperature=0.7, stop=()), epoch=2
    )


@asynccontextmanager
async def opened(**settings: Any) -> Any:
    config = EpisodeConfig(**settings)
    driver = AgentDriver(config, Conversation(TOKENS, history=config.history), 1000)  # type: ignore[arg-type]
    await driver.open("127.0.0.1")
    try:
        yield driver
    finally:
        await driver.shut()


async def play(
    sampler: Sampler, agent: Callable[..., Any], request: GenerationRequest | None = None, **more: Any
) -> Rollout:
    """An episode of an ``agent(client, row)`` of the test."""

    async def relayed(base_url: str, api_key: str, row: Any) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await agent(client, row)

    agents.RELAY["agent"] = relayed
    async with opened(agent="tests.agents:relay", **more) as driver:
        return await driver.play(request or asked(), sampler)


def assert_row_is_what_was_sampled(rollout: Rollout, sampler: Sampler) -> None:
    """Sampled stretches are the sampler's tokens, log-probs and versions, and each turn saw all of the row before."""
    row = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
    assert len(rollout.turns) == len(sampler.turns)
    sampled = np.zeros(len(rollout.response_ids), bool)
    for place, made, request in zip(rollout.turns, sampler.turns, sampler.asked, strict=True):
        own = slice(place.start, place.end)
        sampled[own] = True
        assert rollout.response_ids[own].tolist() == made.response_ids.tolist()
        assert rollout.behavior_logprobs[own].tolist() == made.behavior_logprobs.tolist()
        assert rollout.policy_versions[own].tolist() == made.policy_versions.tolist()
        assert request.prompt_ids.tolist() == row[: len(rollout.prompt.token_ids) + place.start].tolist()
    assert (rollout.policy_versions[~sampled] == OBSERVED).all() and not rollout.behavior_logprobs[~sampled].any()
    assert [request.tag for request in sampler.asked] == list(range(len(sampler.asked)))


async def chat(client: AsyncOpenAI, messages: Sequence[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="mine", messages=list(messages), **more)  # type: ignore[arg-type]


async def test_a_chat_of_turns_with_tools_is_one_row() -> None:
    sampler = Sampler(f"Let me add. {CALLED}<|im_end|>", "It is 5.<|im_end|>", "Bye.<|im_end|>")

    async def agent(client: AsyncOpenAI, row: Any) -> float:
        assert row == {"level": 3, "prompt": "What is 2+3?", "answer": "5", "seed": 11}
        messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, USER]
        first = await chat(client, messages, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        assert first.choices[0].finish_reason == "tool_calls" and first.model == "mine"
        assert first.choices[0].message.content == "Let me add."
        assert first.usage.prompt_tokens == len(sampler.asked[0].prompt_ids)
        assert first.usage.completion_tokens == len(sampler.turns[0].response_ids)
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        second = await chat(client, messages, tools=[TOOL])
        assert second.choices[0].message.content == "It is 5." and second.choices[0].finish_reason == "stop"
        said = {"role": "assistant", "content": " It is 5.\n"}  # written anew by the agent, and not quite the same
        third = await chat(client, [*messages, said, {"role": "user", "content": "Thanks!"}], tools=[TOOL])
        assert third.choices[0].message.content == "Bye."
        return 0.5

    rollout = await play(sampler, agent)
    assert_row_is_what_was_sampled(rollout, sampler)
    assert rollout.episode_reward == 0.5 and rollout.finish_reason == "stop" and rollout.epoch == 2
    assert [turn.tools for turn in rollout.turns] == [("add",), (), ()] and rollout.turns[0].seconds > 0
    text = TOKENS.decode(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and text.count("<|im_start|>") == 7
    result = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 5."
    )
    assert result in text and text.endswith(
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>"
    )


async def test_completions_of_texts_and_of_tokens_continue_their_row() -> None:
    sampler = Sampler("4, no 5<|im_end|>", "6")

    async def with_texts(client: AsyncOpenAI, row: Any) -> None:
        first = await client.completions.create(model="mine", prompt="2+3=")
        assert first.choices[0].text == "4, no 5"
        second = await client.completions.create(model="mine", prompt=["2+3=4, no 5<|im_end|>\n3+3="])
        assert second.choices[0].text == "6" and second.choices[0].finish_reason == "stop"

    rollout = await play(sampler, with_texts)
    assert_row_is_what_was_sampled(rollout, sampler)
    assert rollout.prompt.token_ids.tolist() == ids("2+3=") and rollout.episode_reward is None
    assert rollout.prompt.text == "What is 2+3?"  # the task's own, for records and reward functions
    assert TOKENS.decode(rollout.response_ids) == "4, no 5<|im_end|><|im_end|>\n3+3=6"

    sampler = Sampler("5<|im_end|>", "6")

    async def with_tokens(client: AsyncOpenAI, row: Any) -> None:
        extra = {"return_token_ids": True}
        first: Any = await client.completions.create(model="mine", prompt=ids("2+3="), extra_body=extra)
        choice = first.choices[0]
        assert choice.prompt_token_ids == ids("2+3=") and choice.token_ids == ids("5<|im_end|>")
        more = [*choice.prompt_token_ids, *choice.token_ids, *ids("\n3+3=")]
        await client.completions.create(model="mine", prompt=[more])
        with pytest.raises(openai.BadRequestError, match=NOT_CONTINUED):
            await client.completions.create(model="mine", prompt=[1, *more])
        with pytest.raises(openai.BadRequestError, match="another kind"):
            await chat(client, [USER])

    rollout = await play(sampler, with_tokens)
    assert_row_is_what_was_sampled(rollout, sampler)
    assert TOKENS.decode(rollout.response_ids) == "5<|im_end|>\n3+3=6"


async def test_streams_say_what_whole_answers_say() -> None:
    sampler = Sampler(f"Hm. {CALLED}<|im_end|>")

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        stream = await chat(
            client, [USER], tools=[TOOL], stream=True, stream_options={"include_usage": True}, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        events = [event async for event in stream]
        assert events[0].choices[0].delta.content == "Hm." and events[0].choices[0].delta.role == "assistant"
        (call,) = events[0].choices[0].delta.tool_calls
        assert (call.index, call.function.name) == (0, "add")
        assert events[0].prompt_token_ids == sampler.asked[0].prompt_ids.tolist()
        assert events[0].choices[0].token_ids == sampler.turns[0].response_ids.tolist()
        assert [event.choices[0].finish_reason for event in events[:2]] == [None, "tool_calls"]
        assert (
            events[-1].usage.completion_tokens
            == len(sampler.turns[0].response_ids)
            == len(events[0].choices[0].logprobs.content)
        )

    await play(sampler, agent)
    sampler = Sampler("five")

    async def completing(client: AsyncOpenAI, row: Any) -> None:
        stream = await client.completions.create(model="mine", prompt="2+3=", stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == "five"

    await play(sampler, completing)


async def test_logprobs_and_token_ids_are_the_samplers() -> None:
    sampler = Sampler("5ö<|im_end|>", "so")

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        told = await chat(client, [USER], logprobs=True, extra_body={"return_token_ids": True})
        content = told.choices[0].logprobs.content
        assert [one.logprob for one in content] == [-0.25, -0.5, -0.75, -1.0]
        assert content[0].token == "5" and content[-1].token == "<|im_end|>"
        assert told.choices[0].token_ids == sampler.turns[0].response_ids.tolist()
        assert told.prompt_token_ids == sampler.asked[0].prompt_ids.tolist()

    await play(sampler, agent)
    sampler = Sampler("so")

    async def completing(client: AsyncOpenAI, row: Any) -> None:
        told = await client.completions.create(model="mine", prompt="2+3=", logprobs=1)
        logprobs: Any = told.choices[0].logprobs
        assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["s", "o"], [-0.25, -0.5], [0, 1])

    await play(sampler, completing)


async def test_lengths_stops_and_sampling_settings() -> None:
    sampler = Sampler("one two three<|im_end|>", "Thought\nObservation: made up", "two")

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        short = await chat(client, [USER], max_completion_tokens=3, temperature=0.0, seed=3, top_p=1.0)
        assert short.choices[0].message.content == "one" and short.choices[0].finish_reason == "length"
        assert short.ignored_settings == ["temperature", "seed"]
        messages = [USER, short.choices[0].message, {"role": "user", "content": "Go on."}]
        cut = await chat(client, messages, stop=["Observation:"], temperature=0.7)
        assert cut.choices[0].message.content == "Thought\n" and not hasattr(cut, "ignored_settings")
        messages += [{"role": "assistant", "content": "Thought"}, {"role": "user", "content": "Observation: 5"}]
        await chat(client, messages, parallel_tool_calls=False, tool_choice="auto", n=1)

    rollout = await play(sampler, agent)
    assert_row_is_what_was_sampled(rollout, sampler)
    lengths = [request.sampling.max_completion_length for request in sampler.asked]
    assert lengths == [3, 400 - rollout.turns[1].start, 400 - rollout.turns[2].start]
    assert [request.sampling.stop for request in sampler.asked] == [(), ("Observation:",), ()]
    assert {request.sampling.temperature for request in sampler.asked} == {0.7}
    assert "Thought\nObservation:<|im_end|>\n" in TOKENS.decode(rollout.response_ids)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": 2}, "n=2 is not supported; allowed: 1"),
        ({"temperature": 0.1}, "temperature=0.1 differs from the run's 0.7"),
        ({"logit_bias": {"5": 1}}, "logit_bias="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"tool_choice": "required", "tools": [TOOL]}, 'tool_choice="required" is not supported; allowed: "auto"'),
        ({"max_tokens": 0}, "allowed: 1 or more"),
        ({"stop": [""]}, "at least one character"),
        ({"top_logprobs": 4, "logprobs": True}, "top_logprobs=4"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "allowed: system, user"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "no text"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "last message is the assistant's"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs="),
    ],
)
async def test_calls_that_are_refused_say_why_and_leave_the_row_as_it_is(wrong: dict[str, Any], said: str) -> None:
    sampler = Sampler("5")

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, **{"messages": [USER], **wrong})
        assert said in str(caught.value.body["message"]), caught.value  # type: ignore[index, call-overload]
        assert not sampler.asked
        await chat(client, [USER])

    rollout = await play(sampler, agent, agent_sampling="refuse")
    assert len(rollout.turns) == 1 and rollout.finish_reason == "stop"


async def test_a_history_that_was_edited_is_refused() -> None:
    sampler = Sampler("5<|im_end|>")
    more = {"role": "user", "content": "And 3+3?"}

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        first = await chat(client, [USER])
        own = first.choices[0].message
        for wrong, why in (
            ([{"role": "user", "content": "Other."}, own, more], "message 1"),
            ([USER, {"role": "assistant", "content": "6"}, more], "message 2"),
            ([USER, own], "none is new"),
            ([USER, own, {"role": "system", "content": "Stop."}], "role system"),
            ([USER, own, {"role": "tool", "content": "5", "tool_call_id": "call_1_0"}], "no call of the last answer"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(client, wrong)
            assert why in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="its tools are others"):
            await chat(client, [USER, own, more], tools=[TOOL])
        await chat(client, [USER, own, more])

    rollout = await play(sampler, agent)
    assert_row_is_what_was_sampled(rollout, sampler)
    assert len(rollout.turns) == 2


async def test_keys_open_their_own_episode_until_its_end() -> None:
    sampler, held = Sampler("5"), []

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        await chat(client, [USER])
        assert [model.id async for model in client.models.list()] == ["policy"]
        held.append((str(client.base_url), client.api_key))
        for key in ("sk-other", client.api_key[:-1] + "x", "x" + client.api_key, "ö"):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{client.base_url}chat/completions", json={}, headers=_key(key)) as answer,
            ):
                assert answer.status == 401 and (await answer.json())["error"]["code"] == "unknown_key"
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
            await client.embeddings.create(model="mine", input="x")

    agents.RELAY["agent"] = lambda base_url, api_key, row: agent(AsyncOpenAI(base_url=base_url, api_key=api_key), row)
    async with opened(agent="tests.agents:relay") as driver:
        first = await driver.play(asked(), sampler)
        late = AsyncOpenAI(base_url=held[0][0], api_key=held[0][1])
        with pytest.raises(openai.APIStatusError, match="The episode is over") as caught:
            await chat(late, [USER])
        assert caught.value.status_code == 410
        await driver.play(asked(number=8), sampler)
    assert len(first.turns) == 1 and len({key for _, key in held}) == 2


async def test_calls_at_once_are_answered_one_after_another() -> None:
    """Of two equal ones the second is no continuation; of one whose client gave up the answer is kept for it."""
    sampler = Sampler("5", "6", seconds=0.2)

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        both = await asyncio.gather(chat(client, [USER]), chat(client, [USER]), return_exceptions=True)
        assert sorted(type(one).__name__ for one in both) == ["BadRequestError", "ChatCompletion"]
        messages = [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Next?"}]
        with pytest.raises(openai.APITimeoutError):
            await chat(client.with_options(timeout=0.05), messages)
        assert (await chat(client, messages)).choices[0].message.content == "6"
        again = {"x-stainless-retry-count": "1"}
        assert (await chat(client, messages, extra_headers=again)).choices[0].message.content == "6"

    rollout = await play(sampler, agent)
    assert_row_is_what_was_sampled(rollout, sampler)
    assert len(rollout.turns) == 2


async def test_limits_end_the_episode_and_what_was_sampled_stays() -> None:
    async with opened(agent="tests.agents:greedy") as driver:
        rollout = await driver.play(asked(most=30), Sampler("fourteen chars"))
        assert rollout.finish_reason == "length" and len(rollout.turns) == 4 and len(rollout.response_ids) == 30
        assert rollout.episode_reward is None
        with pytest.raises(EpisodeError, match="no room for an answer after a text of 4 tokens"):
            await driver.play(asked(most=0), Sampler("x"))
    async with opened(agent="tests.agents:greedy", max_turns=2) as driver:
        rollout = await driver.play(asked(), Sampler("x"))
        assert rollout.finish_reason == "length" and len(rollout.turns) == 2
        steps, _ = driver.steps.take()
        assert [step.name for step in steps] == ["agent"] * 3, "before, between and after its two turns"
        assert all(one.start <= one.end <= two.start for one, two in pairwise(steps))
    async with opened(agent="tests.agents:asks_and_hangs", episode_seconds=3.0) as driver:
        rollout = await driver.play(asked(), Sampler("x"))
        assert rollout.finish_reason == "length" and len(rollout.turns) == 1
        await asyncio.sleep(0.05)
        assert driver.calls.abandoned == 1


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("fails", r"The agent failed: RuntimeError: no such file, key \*\*\*$"),
        ("hangs", "longer than episode.episode_seconds=0.5"),
        ("idles", "without an answered call"),
    ],
)
async def test_agents_that_fail_are_failed_episodes(agent: str, said: str) -> None:
    async with opened(agent=f"tests.agents:{agent}", episode_seconds=0.5) as driver:
        with pytest.raises(EpisodeError, match=said):
            await driver.play(asked(), Sampler("5"))


async def test_rewards_are_finite_numbers() -> None:
    for given, told in ((None, None), (1, 1.0), ({"reward": 0.25}, 0.25), ({}, None)):

        async def agent(client: AsyncOpenAI, row: Any, given: Any = given) -> Any:
            await chat(client, [USER])
            return given

        assert (await play(Sampler("5"), agent)).episode_reward == told
    for wrong in (float("nan"), "good"):

        async def failing(client: AsyncOpenAI, row: Any, wrong: Any = wrong) -> Any:
            await chat(client, [USER])
            return wrong

        with pytest.raises(EpisodeError, match="allowed: a finite number, or None"):
            await play(Sampler("5"), failing)


async def test_a_turn_that_cannot_be_sampled_fails_the_episode() -> None:
    async def sample(request: GenerationRequest) -> Rollout:
        raise EpisodeError("The engine is gone.")

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        with pytest.raises(openai.APIStatusError, match="The engine is gone") as caught:
            await chat(client, [USER])
        assert caught.value.status_code == 410

    with pytest.raises(EpisodeError, match="The engine is gone"):
        await play(sample, agent)  # type: ignore[arg-type]


async def test_an_episode_that_is_given_up_ends_its_calls() -> None:
    ended = asyncio.Event()
    sampler = Sampler("5", seconds=30.0)

    async def agent(client: AsyncOpenAI, row: Any) -> None:
        with pytest.raises(openai.APIStatusError, match="The episode is over"):
            await asyncio.shield(asyncio.ensure_future(_ask(client)))

    async def _ask(client: AsyncOpenAI) -> None:
        try:
            await chat(client, [USER])
        finally:
            ended.set()

    async def relayed(base_url: str, api_key: str, row: Any) -> Any:
        await agent(AsyncOpenAI(base_url=base_url, api_key=api_key), row)

    agents.RELAY["agent"] = relayed
    async with opened(agent="tests.agents:relay") as driver:
        playing = asyncio.ensure_future(driver.play(asked(), sampler))
        while not sampler.asked:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait_for(ended.wait(), 5.0)
        with pytest.raises(asyncio.CancelledError):
            await playing


async def test_processes_play_twenty_episodes() -> None:
    sampler = Sampler("5")
    async with opened(agent_command=f"{PROGRAM} sums") as driver:
        most = asyncio.Semaphore(4)

        async def one(number: int) -> Rollout:
            async with most:
                return await driver.play(asked("2+3=", number=number), sampler)

        played = await asyncio.gather(*(one(number) for number in range(20)))
    assert [rollout.episode_reward for rollout in played] == [1.0] * 20
    assert [TOKENS.decode(rollout.response_ids) for rollout in played] == ["52+3=5"] * 20
    lines = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one
            lines.append(" ".join(process.cmdline()))
    assert not [line for line in lines if "tests.agent_program" in line]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{PROGRAM} fails", r"exit code 1: RuntimeError: no such file, key \*\*\*$"),
        (f"{PROGRAM} hangs", "longer than episode.episode_seconds=2"),
        ("true", "without an answered call"),
        (f"{PROGRAM} leaves", "without an answered call"),
        ("false", "exit code 1: it said nothing"),
    ],
)
async def test_processes_that_fail_are_failed_episodes(command: str, said: str) -> None:
    before = {process.pid for process in psutil.Process().children()}  # of other tests
    async with opened(agent_command=command, episode_seconds=2.0) as driver:
        with pytest.raises(EpisodeError, match=said):
            await driver.play(asked(), Sampler("5"))
    assert not {process.pid for process in psutil.Process().children()} - before


def test_settings_that_cannot_be_are_refused() -> None:
    for settings, said in (
        ({"agent": "tests.agents:sums", "agent_command": "true"}, "keep one"),
        ({"agent": "tests.agents:sums", "tools": ["calculator"]}, "keep one"),
        ({"agent_command": '"'}, "is no command line"),
        ({"agent_command": " "}, "is blank"),
        ({"agent_command": "no-such-program x"}, "there is no program no-such-program"),
        ({"agent": "tests.agents:none"}, "has no 'none'"),
    ):
        with pytest.raises(ConfigError, match=said):
            AgentDriver(EpisodeConfig(**settings), Conversation(TOKENS), 100)  # type: ignore[arg-type]


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"endpoint_host=203\.0\.113\.7 is no address at which this machine can listen"
    ):
        async with opened(agent_command="true", endpoint_host="203.0.113.7"):
            pass
    async with opened(agent_command="true", endpoint_host="0.0.0.0") as driver:
        assert driver._endpoint.base_url.startswith("http://127.0.0.1:")


@pytest.mark.thorough
async def test_a_core_answers_two_hundred_calls_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """32 episodes at once, of 20 calls each with growing histories; a plain client in this process counts too."""
    sampler = Sampler("The sum is five, as far as I know.<|im_end|>")

    async def relayed(base_url: str, api_key: str, row: Any) -> None:
        messages: list[Any] = [USER]
        for _ in range(20):
            body = {"model": "mine", "messages": messages}
            async with session.post(f"{base_url}/chat/completions", json=body, headers=_key(api_key)) as answer:
                messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "Go on."}]

    agents.RELAY["agent"] = relayed
    async with opened(agent="tests.agents:relay", max_turns=20) as driver, aiohttp.ClientSession() as session:
        for _ in range(2):  # the first time with caches to fill
            began = time.process_time()
            requests = [asked(most=10**4, number=number) for number in range(32)]
            driver._context = 10**5
            played = await asyncio.gather(*(driver.play(request, sampler) for request in requests))
            rate = sum(len(rollout.turns) for rollout in played) / (time.process_time() - began)
    with capsys.disabled():
        print(f"\n{rate:.0f} calls a second of a core, with the client")
    assert rate > 200


def _key(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}
