"""With ``episode.history=fork`` each turn sees what a server would show it, and each sampled token is in one branch."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.driver import Driver
from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.observed_tokens import ObservedTextError
from asyncrlhf.episodes.row import Row
from asyncrlhf.episodes.world import World
from asyncrlhf.rewards.model import policy_ids
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.turns import Fork
from asyncrlhf.types import OBSERVED, GenerationRequest, Prompt, Rollout, SamplingParams
from tests.branching import text_of
from tests.unit.episodes.chat_shapes import SHAPES, read, sampled, tokenizer_for
from tests.unit.episodes.test_conversation import USER, WITH_TOOLS, WORDS, assistant, calling, hostile, rendered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FEW = settings(max_examples=10, deadline=None)
THOUGHT = "<think>\nwhy\n</think>\n\n"
Turn = tuple[dict[str, Any], str, dict[str, Any]]  # an answer, the text that is sampled for it, and what follows


def of_turn(ids: list[int]) -> Rollout:
    count = len(ids)
    return Rollout(
        0,
        0,
        Prompt("", "", np.arange(1)),
        np.array(ids),
        np.full(count, -0.5, np.float32),
        np.zeros(count, int),
        "stop",
    )


def played(tokenizer: PreTrainedTokenizerFast, asked: list[dict[str, Any]], turns: list[Turn], seed: int) -> Row:
    """The row of an episode, compared at each turn with transformers' own rendering of the conversation so far."""
    talk, messages = Conversation(tokenizer, history="fork"), [*asked]
    row = Row(Prompt("p", "", talk.opening(asked)))
    for answer, text, following in turns:
        ids = sampled(tokenizer, text, seed)
        row.sampled(of_turn(ids))
        messages += [answer, following]
        suffix = talk.suffix(ids, [following])
        kept, forks = np.concatenate([row.context, suffix]), len(row.forks)
        whole = talk.rewritten(kept, messages, (), len(asked))
        text = rendered(tokenizer, messages)
        same = read(tokenizer, kept) == text
        assert (whole is None) == same, "it forks exactly where the rendering says something else"
        row.observed(suffix if whole is None else row.fork(whole), [following])
        expected = kept.tolist() if same else tokenizer(text, add_special_tokens=False).input_ids
        assert row.context.tolist() == expected and read(tokenizer, row.context) == text
        assert (len(row.forks) == forks) == (
            row.context.tolist()[: len(kept) - len(suffix)] == kept[: -len(suffix)].tolist()
        )
    return row


@pytest.mark.in_turn
@pytest.mark.parametrize("merging", [True, False], ids=["merges", "bytes"])
@pytest.mark.parametrize("thinks", [False, True], ids=["speaks", "thinks"])
@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"gptoss"}))
@pytest.mark.more_but("qwen", "gemma3", "llama3_1")
def test_questions_follow_what_the_template_renders(name: str, thinks: bool, merging: bool) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template, merging)
    forks = 0

    @FEW
    @given(texts=st.lists(WORDS, min_size=7, max_size=7), ended=st.booleans(), seed=st.integers(0, 99))
    def check(texts: list[str], ended: bool, seed: int) -> None:
        nonlocal forks
        turns = []
        for said, question in (texts[1:3], texts[3:5], texts[5:7]):
            answer, text = assistant(shape, THOUGHT * thinks + said, ended)
            turns.append((answer, text, {"role": "user", "content": question}))
        forks += len(played(tokenizer, [{"role": "user", "content": texts[0]}], turns, seed).forks)

    check()
    if name == "chatml":
        assert not forks
    if thinks and name in ("qwen3", "glm4moe", "deepseekv3"):
        assert forks > 5, "thoughts that the template drops"


@pytest.mark.parametrize("name", sorted(set(WITH_TOOLS) - {"gptoss"}))
def test_results_follow_what_the_template_renders(name: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_for(shape.template)

    @FEW
    @given(texts=st.lists(WORDS, min_size=3, max_size=3), ended=st.booleans(), seed=st.integers(0, 99))
    def check(texts: list[str], ended: bool, seed: int) -> None:
        turns = []
        for result in texts[1:]:
            answer, text = calling(shape, {"a": "12", "b": "x y"}, ended)
            observed = {"role": "tool", "name": "add", "content": result, "tool_call_id": "abcdef123"}
            turns.append((answer, text, observed))
        played(tokenizer, [{"role": "user", "content": texts[0]}], turns, seed)

    check()


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"gptoss"}))
def test_no_text_of_a_rendering_makes_control_tokens(name: str) -> None:
    """Neither what was observed nor special tokens that the model spelled out, letter by letter. Other marks in its
    text, such as those of thoughts, are read as a server reads them."""
    tokenizer = tokenizer_for(SHAPES[name].template)
    talk, control = Conversation(tokenizer, history="fork"), {*tokenizer.get_added_vocab().values()}
    marks = {t.content for t in tokenizer.added_tokens_decoder.values() if not t.special and t.content.strip()}

    def of(said: str, observed: str) -> list[int]:
        messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": observed}]
        return talk.whole(messages, (), 1).tolist()

    meant = [token for token in of("yes", "no") if token in control]
    for text in hostile(tokenizer):
        said = "yes" if any(mark in text for mark in marks) else f"yes {text}"
        try:
            found = of(said, f"no {text}")
        except ObservedTextError:
            assert "think" in text or "[" in text, "only where the template itself looks into the texts"
            continue
        assert [token for token in found if token in control] == meant, text


def test_a_prompt_that_the_model_continues_is_part_of_its_first_answer() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    talk = Conversation(tokenizer, history="fork")
    asked = [USER, {"role": "assistant", "content": "It is"}]
    ids = sampled(tokenizer, " so.<|im_end|>", 1)
    kept = np.concatenate([talk.opening(asked), np.array(ids), talk.suffix(ids, [USER])])
    messages = [*asked, {"role": "assistant", "content": " so."}, USER]
    whole = talk.rewritten(kept, messages, (), 2)
    text = rendered(tokenizer, [USER, {"role": "assistant", "content": "It is so."}, USER])
    assert read(tokenizer, kept if whole is None else whole) == text


def test_without_a_template_and_with_keep_nothing_forks() -> None:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    messages = [USER, {"role": "assistant", "content": "x"}, USER]
    for talk in (Conversation(tokenizer), Conversation(plain, history="fork")):
        assert talk.rewritten(np.arange(3), messages, (), 1) is None
    note = Conversation(tokenizer, history="fork").note
    assert "drops the thoughts" in note and note.endswith("in a branch of its own (episode.history=fork).")


# --- whole episodes ------------------------------------------------------------------------------------------------


class Asks(Environment):
    """Two more questions; the reward counts the right answers."""

    async def reset(self, row: Any) -> None:
        self._asked = 0

    async def step(self, reply: Any) -> Step:
        self._asked += 1
        return Step(f"question {self._asked}", done=self._asked == 3, reward=float(self._asked))


def play(history: str, texts: list[str], longest: int = 4000, context: int = 4000) -> tuple[Rollout, list[Any]]:
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    encoder = PromptEncoder(tokenizer, TaskConfig(chat_template=True, max_prompt_length=500))
    config = EpisodeConfig(environment="tests.unit.episodes.test_forks:Asks", history=history)
    talk = Conversation(tokenizer, history=history)  # type: ignore[arg-type]
    driver = Driver(config, World(config, True), talk, encoder, context, chat=True)
    requests: list[GenerationRequest] = []

    async def sample(asked: GenerationRequest) -> Rollout:
        ids = sampled(tokenizer, texts[len(requests)] + "<|im_end|>", len(requests))
        requests.append(asked)
        cut = np.array(ids[: asked.sampling.max_completion_length])
        numbers = np.full(len(cut), len(requests))
        return Rollout(
            1, 0, asked.prompt, cut, -numbers.astype(np.float32), numbers, "stop" if len(cut) == len(ids) else "length",
            texts[len(requests) - 1], tag=asked.tag,
        )  # fmt: skip

    request = GenerationRequest(1, 0, encoder("p", "question 0"), 7, SamplingParams(longest))
    return asyncio.run(driver.play(request, sample)), requests


def assert_the_row_is_what_was_read(rollout: Rollout, requests: list[Any]) -> None:
    """Each turn's request had the tokens that its first one follows in the row; all sampled tokens lie in turns."""
    prompt, within = len(rollout.prompt.token_ids), np.zeros(len(rollout.response_ids), bool)
    assert len(rollout.turns) == len(requests)
    for turn, request in zip(rollout.turns, requests, strict=True):
        assert text_of(rollout, prompt + turn.start)[:-1] == request.prompt_ids.tolist()
        within[turn.start : turn.end] = True
    assert (within == rollout.sampled).all()


def test_an_episode_whose_template_drops_thoughts() -> None:
    texts = [f"{THOUGHT}answer {i}" for i in range(3)]
    kept, asked = play("keep", texts)
    assert_the_row_is_what_was_read(kept, asked)
    assert not kept.forks
    rollout, requests = play("fork", texts)
    assert_the_row_is_what_was_read(rollout, requests)
    tokenizer = tokenizer_for(SHAPES["qwen3"].template)
    for turn, request in enumerate(requests):
        messages = [{"role": "user", "content": "question 0"}]
        for before in range(turn):
            messages.append({"role": "assistant", "content": f"answer {before}"})
            messages.append({"role": "user", "content": f"question {before + 1}"})
        assert read(tokenizer, request.prompt_ids) == rendered(tokenizer, messages)
    assert len(rollout.forks) == 2 and all(fork.follows > 0 for fork in rollout.forks)
    assert (rollout.messages, rollout.response_text) == (kept.messages, kept.response_text), "one conversation"
    assert rollout.sampled.sum() == kept.sampled.sum() and rollout.episode_reward == 6.0
    text = read(tokenizer, policy_ids(rollout))
    assert text == read(tokenizer, requests[-1].prompt_ids) + texts[-1] + "<|im_end|>" and text.count("why") == 1


def test_room_is_that_of_a_branch_in_the_context_and_of_the_row_in_the_response() -> None:
    texts = [f"<think>\n{'long ' * 40}\n</think>\n\nyes" for _ in range(3)]
    whole, _ = play("fork", texts)
    longest = max(len(text_of(whole, len(whole.prompt.token_ids) + turn.end - 1)) for turn in whole.turns)
    row = len(whole.prompt.token_ids) + len(whole.response_ids)
    assert longest < row / 2
    again, _ = play("fork", texts, context=longest)
    assert again.finish_reason == "stop" and again.response_ids.tolist() == whole.response_ids.tolist()
    for cut, requests in (
        play("fork", texts, context=longest - 1),
        play("fork", texts, longest=len(whole.response_ids) - 1),
    ):
        assert cut.finish_reason == "length" and len(cut.turns) == 3
        assert_the_row_is_what_was_read(cut, requests)
        assert len(cut.response_ids) == len(whole.response_ids) - 1
    short, _ = play("keep", texts, context=longest)
    assert short.finish_reason == "length", "what is kept has no room"


def test_what_ends_a_row_goes_with_its_fork() -> None:
    """An episode that ends while a turn of another branch is being sampled ends with the turn before."""
    row = Row(Prompt("p", "", np.arange(3)))
    row.sampled(of_turn([5, 6]))
    row.observed(row.fork(np.array([0, 1, 9, 9])), [{"role": "user", "content": "later"}])
    assert row.context.tolist() == [0, 1, 9, 9] and row.forks == [Fork(2, 1)]
    request = GenerationRequest(1, 0, row.prompt, 7, SamplingParams(10))
    rollout = row.rollout(request, "length", None)
    assert rollout.forks == () and rollout.response_ids.tolist() == [5, 6] and len(rollout.messages) == 1


def test_a_row_shares_the_longest_beginning_of_any_branch() -> None:
    row = Row(Prompt("p", "", np.array([1, 2])))
    row.sampled(of_turn([3, 4]))
    row.observed(row.fork(np.array([7, 8])), [USER])
    row.sampled(of_turn([9]))
    assert row.shared(np.array([7, 8, 9, 1])) == (3, 6) and row.shared(np.array([1, 2, 3, 5])) == (3, 2)
    assert row.shared(np.array([5])) == (0, -1) and row.shared(np.array([1, 2, 3, 4])) == (4, 3)
    row.observed(row.fork(np.array([1, 2, 3, 5])), [USER])
    row.sampled(of_turn([6]))
    rollout = row.rollout(GenerationRequest(1, 0, row.prompt, 7, SamplingParams(10)), "stop", None)
    assert rollout.forks == (Fork(2, -1), Fork(5, 2)) and (rollout.policy_versions == OBSERVED).sum() == 3
    assert text_of(rollout, 8) == [1, 2, 3, 5, 6] and text_of(rollout, 6) == [7, 8, 9]
