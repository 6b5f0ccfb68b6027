"""reasoning-gym as a task: its own scores, held-out questions kept out of training, wrong names refused."""

from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.reasoning import ReasoningTask


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Reads any text, one token a byte; stands in for a real model's tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


TOKENIZER = byte_tokenizer()
ONE_DIGIT = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlhf.tasks.reasoning.TRAIN_SIZE", 200)


def make(*datasets: str, **settings: Any) -> ReasoningTask:
    settings = {"heldout_size": 20, **settings}
    task = build_task(TaskConfig(kind="reasoning_gym", datasets=list(datasets), **settings), TOKENIZER)
    assert isinstance(task, ReasoningTask)
    return task


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym, .*: pip install 'asyncrlhf\[reasoning\]'"):
        make("spell_backward")


def test_reference_answers_score_one_and_datasets_take_turns() -> None:
    task = make("chain_sum", "letter_counting", "coin_flip")
    source = task.train_source(seed=1)
    prompts = [source.next() for _ in range(60)]
    for prompt in [*prompts, *task.heldout()]:
        assert prompt.answer is not None
        assert task.reward(prompt, f"Answer: {prompt.answer}") == pytest.approx(1.0)
        assert task.reward(prompt, "") < 0.5
    names = [p.metadata["dataset"] for p in task.heldout()]
    assert names[:4] == ["chain_sum", "letter_counting", "coin_flip", "chain_sum"]
    assert {p.metadata["dataset"] for p in prompts} == set(names)


def test_the_score_is_that_of_the_dataset() -> None:
    task = make("spell_backward")
    dataset = reasoning_gym.create_dataset("spell_backward", size=5, seed=0)
    for prompt, entry in zip(task.heldout(), dataset, strict=False):
        assert prompt.text == entry["question"]
        for answer in (entry["answer"], entry["answer"][:-1], entry["answer"] + "x", "z"):
            assert task.reward(prompt, f"<answer>{answer}</answer>") == dataset.score_answer(answer, entry)


def test_a_small_dataset_keeps_its_heldout_questions_out_of_training() -> None:
    task = make("chain_sum", dataset_options=ONE_DIGIT, heldout_size=50)
    heldout = {p.text for p in task.heldout()}
    assert len(heldout) == 50
    for seed in (0, 1):
        source = task.train_source(seed)
        assert not heldout & {source.next().text for _ in range(200)}


def test_seeds_give_other_prompts_and_each_the_same_again() -> None:
    task = make("chain_sum")
    drawn = []
    for seed in (0, 0, 1):
        source = task.train_source(seed)
        drawn.append([source.next().text for _ in range(20)])
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_long_training_prompts_are_passed_over() -> None:
    settings: dict[str, Any] = {"heldout_size": 1}
    lengths = sorted(len(p.token_ids) for p in make("chain_sum", heldout_size=100).heldout())
    limit = max(lengths[30], len(make("chain_sum", **settings).heldout()[0].token_ids))
    source = make("chain_sum", max_prompt_length=limit, **settings).train_source(0)
    assert lengths[-1] > limit
    assert all(len(source.next().token_ids) <= limit for _ in range(50))


@pytest.mark.parametrize(
    ("datasets", "settings", "message"),
    [
        (["chain_sums"], {}, r"no dataset 'chain_sums' \(did you mean chain_sum\?\)"),
        (["chain_sum"], {"dataset_options": {"chain_sum": {"colour": 1}}}, "dataset_options.chain_sum=.*is refused"),
        (
            ["chain_sum"],
            {"dataset_options": {"chain_sum": {"min_terms": -1}}},
            "dataset_options.chain_sum=.*is refused",
        ),
        (["chain_sum"], {"dataset_options": {"gcd": {}}}, r"names \['gcd'\], not among"),
        (["chain_sum"], {"max_prompt_length": 5}, r"The prompt chain_sum:0 has \d+ tokens; allowed: at most .*=5"),
        ([], {}, "needs task.datasets"),
    ],
)
def test_wrong_settings_are_one_sentence(datasets: list[str], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(*datasets, **settings)
    assert "\n" not in str(caught.value)


def test_another_dataset_than_those_of_the_tasks_file_is_had_by_what_the_refusal_says() -> None:
    chosen = ["task=reasoning_gym", "task.datasets=[gcd]", "model.path=tiny", "run_dir=unused"]
    with pytest.raises(ConfigError) as caught:
        load_config(chosen)
    said = [word for word in str(caught.value).split() if word.startswith("~")]
    assert load_config([*chosen, *said]).task.dataset_options == {}


def test_a_dataset_that_is_all_held_out_is_refused() -> None:
    # Coin flips of one coin: reasoning-gym has only a handful of such questions.
    options = {"coin_flip": {"min_trials": 1, "max_trials": 1}}
    with pytest.raises(ConfigError, match="coin_flip gave no training prompt"):
        make("coin_flip", dataset_options=options, heldout_size=200)
