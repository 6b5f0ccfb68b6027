"""Which prompts a curriculum asks again, and that it goes on from its state as if it had never stopped."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from asyncrlhf.data.curriculum import POOL, Curriculum
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.types import Prompt

SOLVED = {"never": 0.0, "half": 0.5, "always": 1.0}


def source(length: int | None = 30, seed: int = 0) -> PromptSource:
    """Prompts that are solved never, half of the time and always, in turn."""
    words = list(SOLVED)
    return PromptSource(lambda i: Prompt(f"{i}-{words[i % 3]}", "", np.arange(2)), length, seed)


def rewards(prompt: Prompt, rng: np.random.Generator) -> list[float]:
    return [float(x) for x in rng.random(8) < SOLVED[prompt.prompt_id.partition("-")[2]]]


def drawn(stream: PromptSource, draws: int) -> Counter[str]:
    """How often each kind came, each group heard of before the next draw."""
    rng, kinds = np.random.default_rng(0), Counter[str]()
    for _ in range(draws):
        prompt = stream.next()
        kinds[prompt.prompt_id.partition("-")[2]] += 1
        stream.heard(prompt, rewards(prompt, rng))
    return kinds


@pytest.mark.parametrize("length", [30, None])
@pytest.mark.parametrize("kind", ["difficulty", "regret"])
def test_prompts_that_are_solved_now_and_then_come_more_often(kind: str, length: int | None) -> None:
    plain, chosen = drawn(source(length), 600), drawn(Curriculum(source(length), kind, right=1.0), 600)
    assert max(plain.values()) - min(plain.values()) <= 20
    assert chosen["half"] > 1.4 * plain["half"], "half of the draws are by worth, and most of those are of this kind"
    assert min(chosen["never"], chosen["always"]) > 60, "what was judged once is judged again"


def test_a_prompt_that_is_learned_leaves() -> None:
    stream, rng = Curriculum(source(), "difficulty", right=1.0), np.random.default_rng(0)
    counts: list[Counter[str]] = [Counter(), Counter()]
    for draw in range(1200):
        prompt = stream.next()
        learned = draw >= 600 and prompt.prompt_id.startswith(("1-", "4-"))
        stream.heard(prompt, [1.0] * 8 if learned else rewards(prompt, rng))
        counts[draw >= 700][prompt.prompt_id] += 1
    for name in ("1-half", "4-half"):
        assert counts[1][name] / 500 < 0.75 * counts[0][name] / 700


def test_what_is_under_way_is_not_asked_again_but_by_the_stream() -> None:
    stream = Curriculum(source(None), "difficulty", right=1.0)
    ids = [stream.next().prompt_id for _ in range(200)]
    assert len(set(ids)) == 200, "nothing was heard, and nothing is known"
    stream.heard(Prompt(ids[1], "", np.arange(2)), [0.0, 1.0])
    again = [stream.next().prompt_id for _ in range(50)]
    assert again.count(ids[1]) == 1, "its answers are under way again"


def test_failed_answers_and_strangers_are_nothing_to_know() -> None:
    stream = Curriculum(source(), "regret", right=1.0)
    prompt = stream.next()
    stream.heard(prompt, [])
    stream.heard(Prompt("stranger", "", np.arange(2)), [1.0])
    pool = stream.state()["pool"]
    assert pool.keys() == {prompt.prompt_id} and pool[prompt.prompt_id]["asked"]


@pytest.mark.parametrize("kind", ["difficulty", "regret"])
def test_it_goes_on_from_its_state(kind: str) -> None:
    rng = np.random.default_rng(3)
    whole = Curriculum(source(), kind, right=1.0)
    waiting: list[Prompt] = []
    for _ in range(100):  # answers come late, in another order
        waiting.append(whole.next())
        if len(waiting) > 5:
            prompt = waiting.pop(int(rng.integers(5)))
            whole.heard(prompt, rewards(prompt, rng))
    again = Curriculum(source(), kind, right=1.0)
    again.restore(json.loads(json.dumps(whole.state(), allow_nan=False)))
    after = []
    for stream in (whole, again):
        for prompt in waiting:
            stream.heard(prompt, rewards(prompt, np.random.default_rng(9)))
        after.append([stream.next().prompt_id for _ in range(50)])
    assert after[0] == after[1]


def test_the_order_in_which_groups_end_does_not_matter() -> None:
    found = []
    for order in (1, -1):
        stream = Curriculum(source(), "difficulty", right=1.0)
        ids = []
        for _ in range(20):
            batch = [stream.next() for _ in range(4)]
            for prompt in batch[::order]:
                stream.heard(prompt, rewards(prompt, np.random.default_rng(len(prompt.prompt_id))))
            ids += [prompt.prompt_id for prompt in batch]
        found.append(ids)
    assert found[0] == found[1]


def test_a_mean_that_rounds_above_the_best_reward_has_no_regret() -> None:
    stream = Curriculum(source(3), "regret", right=1.0)
    for draw in range(400):
        stream.heard(stream.next(), [0.1, 0.1, 0.1] if draw < 390 else [0.1, 0.3])


def test_it_remembers_a_bounded_number() -> None:
    stream = Curriculum(source(None), "difficulty", right=1.0)
    drawn(stream, 3 * POOL)
    assert len(stream.state()["pool"]) == POOL


def test_a_checkpoint_without_one_is_taken_up() -> None:
    plain = source()
    for _ in range(7):
        plain.next()
    stream = Curriculum(source(), "difficulty", right=1.0)
    stream.restore(plain.state())
    assert stream.next().prompt_id == plain.next().prompt_id
