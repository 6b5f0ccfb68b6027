"""The data that the study makes itself: demonstrations for fine-tuning, and prompts where the task has none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrlhf.config.compose import load_config
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.task import Task

DEMONSTRATIONS = "demonstrations.jsonl"
PROMPTS = "prompts.jsonl"
SUMS = 4096
CARELESSNESS = 4.0  # standard deviation of what a demonstrator's sum is off by
REQUESTS = (
    "Write one sentence about {}.",
    "In one sentence, what do you think of {}?",
    "Say something short about {}.",
    "Give me a short remark about {}.",
    "How would you describe {} to a friend, in one sentence?",
    "Write the first line of a diary entry about {}.",
    "Write a very short review of {}.",
    "What did the visitor say about {}?",
    "Begin a letter with a sentence about {}.",
    "Describe {} in a few words.",
    "What would a child say about {}?",
    "Write a caption for a photo of {}.",
)
THINGS = tuple((Path(__file__).parent / "things.txt").read_text().splitlines())  # what the requests are about
MOODS = (
    ("wonderful", "lovely", "charming", "delightful", "great", "friendly", "beautiful", "cheerful"),
    ("dull", "awful", "boring", "terrible", "gloomy", "noisy", "disappointing", "unpleasant"),
    ("long", "small", "quiet", "busy", "early", "ordinary", "crowded", "modern"),
)
SENTENCES = (
    "{thing} was {first}, and I found it {second} as well.",
    "I would call {thing} {first} and {second}.",
    "People say that {thing} is {first}.",
    "{thing} felt {first} today, almost {second}.",
    "We went there, and {thing} turned out to be {first}.",
)


def write_sums(folder: Path, seed: int, overrides: Sequence[str]) -> list[str]:
    """Sums of two digits by careless demonstrators, so that the fine-tuned model has much to learn from preferences."""
    source, rng = _task(overrides).train_source(seed), np.random.default_rng([seed, 2])
    rows = []
    for _ in range(SUMS):
        prompt = source.next()
        assert prompt.answer is not None
        careless = max(0, int(prompt.answer) + round(rng.normal(0.0, CARELESSNESS)))
        rows.append({"prompt": prompt.text, "completion": str(careless)})
    write_lines(folder / DEMONSTRATIONS, rows)
    return []


def write_sentences(folder: Path, seed: int, overrides: Sequence[str]) -> list[str]:
    """Requests for one sentence about something, and for half of those to train on a sentence of praise, blame or
    neither, so that the fine-tuned model writes short answers of every mood. Returns the overrides that name the
    prompts."""
    rng = np.random.default_rng([seed, 3])
    about = {request.format(thing): thing for request in REQUESTS for thing in THINGS}
    write_lines(folder / PROMPTS, [{"prompt": request} for request in about])
    named = ["task=prompts", f"task.path={folder / PROMPTS}"]
    heldout = {prompt.text for prompt in _task([*overrides, *named]).heldout()}
    requests = [request for request in about if request not in heldout]
    shuffled = rng.permutation(len(requests))[: len(about) // 2]
    write_lines(folder / DEMONSTRATIONS, [_conversation(requests[i], about[requests[i]], rng) for i in shuffled])
    return named


def _task(overrides: Sequence[str]) -> Task:
    config = load_config(overrides)
    return build_task(config.task, load_tokenizer(config.model))


def _conversation(request: str, thing: str, rng: np.random.Generator) -> dict[str, Any]:
    mood = MOODS[int(rng.integers(len(MOODS)))]
    first, second = (str(word) for word in rng.choice(mood, size=2, replace=False))
    sentence = str(rng.choice(SENTENCES)).format(thing=thing, first=first, second=second)
    return {
        "prompt": [{"role": "user", "content": request}],
        "completion": [{"role": "assistant", "content": sentence[0].upper() + sentence[1:]}],
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
