"""The arithmetic task: right answers, a split that does not leak, and a checkpoint with far to go."""

from __future__ import annotations

import re

import pytest

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.tasks.arithmetic import ArithmeticTask

TOKENIZER = load_tokenizer(ModelConfig())


def make(**settings: object) -> ArithmeticTask:
    return ArithmeticTask(TaskConfig(**settings), TOKENIZER)  # type: ignore[arg-type]


def parse(text: str) -> tuple[int, str, int]:
    match = re.fullmatch(r"(\d+)([-+*])(\d+)=", text)
    assert match
    return int(match[1]), match[2], int(match[3])


def test_answers_are_right_for_every_operation() -> None:
    source = make(operations=["+", "-", "*"], digits=3).train_source(seed=0)
    seen = set()
    for prompt in (source.next() for _ in range(300)):
        left, operation, right = parse(prompt.text)
        seen.add(operation)
        assert prompt.answer == str(eval(f"{left}{operation}{right}"))
        assert 0 <= left < 1000 and 0 <= right < 1000
        assert TOKENIZER.decode(prompt.token_ids, skip_special_tokens=True) == prompt.text
    assert seen == {"+", "-", "*"}


@pytest.mark.parametrize("digits", [1, 2])
def test_no_heldout_pair_is_trained_on_in_either_order(digits: int) -> None:
    task = make(digits=digits, operations=["+", "-"])
    heldout = {frozenset((a, b)) for a, _, b in (parse(p.text) for p in task.heldout())}
    trained = set()
    for seed in range(3):
        source = task.train_source(seed)
        trained |= {frozenset((a, b)) for a, _, b in (parse(source.next().text) for _ in range(1000))}
    assert heldout and not heldout & trained


def test_heldout_prompts_are_distinct_and_always_the_same() -> None:
    first, second = make().heldout(), make().heldout()
    assert [p.text for p in first] == [p.text for p in second]
    assert len({p.text for p in first}) == len(first) == 256
    assert 5 <= len(make(digits=1).heldout()) <= 100


def test_the_seed_decides_the_training_prompts_and_resume_goes_on() -> None:
    task = make()
    texts = []
    for seed in (0, 0, 1):
        source = task.train_source(seed)
        texts.append([source.next().text for _ in range(50)])
    assert texts[0] == texts[1] != texts[2]
    source = task.train_source(0)
    source.restore({"position": 20, "seed": 0, "length": None})
    assert source.next().text == texts[0][20]


def test_reward_is_exact_match() -> None:
    task = make()
    prompt = task.heldout()[0]
    assert prompt.answer
    assert task.reward(prompt, prompt.answer) == 1.0
    assert task.reward(prompt, f" {prompt.answer} ") == 1.0
    for wrong in ("", "x", prompt.answer + "0", prompt.answer[:-1], f"{prompt.answer} {prompt.answer}"):
        assert task.reward(prompt, wrong) == 0.0


def test_prompts_over_the_limit_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"99\+99= has 7 tokens; allowed: at most task.max_prompt_length=6"):
        make(max_prompt_length=6)


def test_the_packaged_checkpoint_earns_reward_now_and_then_and_has_far_to_go() -> None:
    task, model = make(), load_model(ModelConfig())
    prompts = task.heldout()
    batch = TOKENIZER([p.text for p in prompts], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, batch.input_ids.shape[1] :]
    texts = TOKENIZER.batch_decode(out, skip_special_tokens=True)
    accuracy = sum(task.reward(p, t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)
    assert 0.2 < accuracy < 0.45
    assert (out == TOKENIZER.eos_token_id).any(dim=1).float().mean() > 0.95
