"""Preference data: labels follow the reward and the noise, pairs use each answer once, bad input is one sentence."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.stage_config import PreferencesConfig
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.stages import preferences as stage
from asyncrlhf.stages.preference_data import PairEncoder
from asyncrlhf.stages.preferences import draw_prompts, make_pairs, prefer_probability, run_preferences
from asyncrlhf.tasks.arithmetic import ArithmeticTask
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Prompt, Rollout

SMALL = (
    "task.digits=1", "task.heldout_size=4", "preferences.num_prompts=12", "preferences.num_generations=5",
    "logging.wandb=disabled", "generator.max_completion_length=4",
)  # fmt: skip


def rollout(number: int, group: int) -> Rollout:
    ids = np.array([number], dtype=np.int64)
    prompt = Prompt(f"p{group}", f"prompt {group}", ids)
    return Rollout(number, group, prompt, ids, np.zeros(1, np.float32), ids * 0, "stop", f"answer {number}", "test")


def answers(groups: int, size: int, seed: int = 0) -> list[tuple[Rollout, float]]:
    """Rewards in steps of 0.25, so that some pairs tie."""
    rng = np.random.default_rng(seed)
    return [(rollout(i, i // size), float(rng.integers(5)) / 4) for i in range(groups * size)]


def test_the_noise_is_that_of_the_papers() -> None:
    """Bradley-Terry by its definition, exp(a) / (exp(a) + exp(b)); a flip by its probability; no noise by the sign."""
    for a, b in ((0.3, 0.1), (-1.0, 2.0), (0.0, 5.0)):
        soft = PreferencesConfig(noise="bradley_terry", temperature=0.5)
        expected = math.exp(a / 0.5) / (math.exp(a / 0.5) + math.exp(b / 0.5))
        assert prefer_probability(a - b, soft) == pytest.approx(expected, rel=1e-12)
        flip = PreferencesConfig(noise="flip", flip_probability=0.2)
        assert prefer_probability(a - b, flip) == pytest.approx(0.8 if a > b else 0.2)
        assert prefer_probability(a - b, PreferencesConfig()) == float(a > b)
    assert prefer_probability(-1e6, PreferencesConfig(noise="bradley_terry")) == 0.0, "no overflow"


def test_an_answer_is_in_one_pair_and_meets_its_siblings_only() -> None:
    scored = answers(groups=200, size=5)
    pairs, ties = make_pairs(scored, PreferencesConfig(), seed=3)
    assert len(pairs) + ties == 200 * 2, "five answers make two pairs"
    used = Counter(r.rollout_id for pair in pairs for r in (pair.chosen, pair.rejected))
    assert max(used.values()) == 1
    gold = {r.rollout_id: reward for r, reward in scored}
    for pair in pairs:
        assert pair.chosen.group_id == pair.rejected.group_id
        assert (pair.gold_chosen, pair.gold_rejected) == (gold[pair.chosen.rollout_id], gold[pair.rejected.rollout_id])
        assert pair.gold_chosen > pair.gold_rejected, "without noise the better answer is chosen"
    # Five values are equally likely, so a fifth of the pairs tie.
    assert ties / 400 == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / 400))
    assert make_pairs(scored, PreferencesConfig(), seed=3)[0] == pairs
    assert make_pairs(scored, PreferencesConfig(), seed=4)[0] != pairs


@pytest.mark.parametrize(
    "config",
    [
        PreferencesConfig(noise="bradley_terry", temperature=0.4),
        PreferencesConfig(noise="flip", flip_probability=0.3),
    ],
)
def test_labels_agree_with_the_reward_as_often_as_the_noise_says(config: PreferencesConfig) -> None:
    pairs, _ = make_pairs(answers(groups=4000, size=2), config, seed=0)
    sizes = [abs(pair.gold_chosen - pair.gold_rejected) for pair in pairs]
    expected = np.array([0.7 if config.noise == "flip" else 1 / (1 + math.exp(-s / 0.4)) for s in sizes])
    error = math.sqrt(float((expected * (1 - expected)).sum())) / len(pairs)
    found = np.mean([pair.gold_chosen > pair.gold_rejected for pair in pairs])
    assert found == pytest.approx(expected.mean(), abs=4 * error)
    assert stage.describe(pairs, [0.0])["agreement"] == pytest.approx(found)
    assert stage.describe(pairs, [0.0])["margin_mean"] == pytest.approx(np.mean(sizes))


def test_prompts_are_all_different_and_a_task_that_has_fewer_says_so() -> None:
    task = ArithmeticTask(TaskConfig(digits=1), load_tokenizer(ModelConfig()))
    everything = 100 - len(task.heldout())
    texts = [prompt.text for prompt in draw_prompts(task.train_source(0), everything)]
    assert len(set(texts)) == everything
    assert not set(texts) & {prompt.text for prompt in task.heldout()}
    with pytest.raises(ConfigError, match=rf"num_prompts={everything + 1} .*at most {everything}\.$"):
        draw_prompts(task.train_source(0), everything + 1)
    assert len(draw_prompts(task.train_source(0), None)) == everything


def test_the_stage_leaves_pairs_that_trl_reads_and_a_summary(tmp_path: Path) -> None:
    """The gold columns are the task's rule, said anew here: a sum is right or wrong."""
    done = run_preferences(load_config([*SMALL, f"run_dir={tmp_path / 'a'}", "seed=5"]))
    text = (tmp_path / "a" / "preferences.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines and all(list(line)[:3] == ["prompt", "chosen", "rejected"] for line in lines)
    for line in lines:
        right = str(sum(int(n) for n in line["prompt"].removesuffix("=").split("+")))
        assert line["gold_chosen"] == float(line["chosen"] == right) == 1.0
        assert line["gold_rejected"] == float(line["rejected"] == right) == 0.0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary == done
    assert (summary["pairs"], summary["agreement"], summary["margin_mean"]) == (len(lines), 1.0, 1.0)
    assert (summary["prompts"], summary["answers"], summary["failed"]) == (12, 60, 0)
    assert (summary["reward_chosen_mean"], summary["reward_rejected_mean"]) == (1.0, 0.0)
    assert summary["ties_dropped"] + len(lines) <= 24
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["preferences"]["num_prompts"] == 12
    again = run_preferences(load_config([*SMALL, f"run_dir={tmp_path / 'b'}", "seed=5"]))
    assert (tmp_path / "b" / "preferences.jsonl").read_text() == text
    assert {k: v for k, v in again.items() if k not in ("run_dir", "preferences")} == {
        k: v for k, v in done.items() if k not in ("run_dir", "preferences")
    }
    with pytest.raises(ConfigError, match=r"already holds preferences\.jsonl"):
        run_preferences(load_config([*SMALL, f"run_dir={tmp_path / 'a'}"]))


def test_chat_tasks_give_conversations() -> None:
    """TRL's conversational form, with the system prompt that the policy saw."""
    (pair,), _ = make_pairs([(rollout(0, 0), 1.0), (rollout(1, 0), 0.0)], PreferencesConfig(), seed=0)
    line = stage._line(pair, TaskConfig(chat_template=True, system_prompt="Be kind."))
    assert line["prompt"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "prompt 0"}]
    assert line["chosen"] == [{"role": "assistant", "content": "answer 0"}]
    assert line["rejected"] == [{"role": "assistant", "content": "answer 1"}]
    assert stage._line(pair, TaskConfig(chat_template=True))["prompt"] == [{"role": "user", "content": "prompt 0"}]


@pytest.mark.parametrize("template", ["{prompt}", "2*{prompt}"])
def test_a_reward_model_reads_of_a_line_what_the_policy_saw(template: str) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    task = TaskConfig(prompt_template=template)
    prompt = PromptEncoder(tokenizer, task)("p", "3+4=")
    scored = [(replace(rollout(i, 0), prompt=prompt, response_text=text), float(i)) for i, text in enumerate("67")]
    (pair,), _ = make_pairs(scored, PreferencesConfig(), seed=0)
    ids = PairEncoder(tokenizer)(stage._line(pair, task))
    for side, answer in (("chosen_ids", "7"), ("rejected_ids", "6")):
        assert ids[side] == [*prompt.token_ids, *tokenizer(answer, add_special_tokens=False).input_ids, 2]


def shown(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    assert main(["preferences", *SMALL, *typed]) == 0
    return capsys.readouterr().out


def test_the_command_shows_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain lines where no terminal listens, a table where one does; with the same figures."""
    plain = shown(capsys, "preferences=flip", "preferences.flip_probability=0.4", f"run_dir={tmp_path / 'a'}")
    lines = dict(line.split(": ", 1) for line in plain.splitlines())
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    pairs = [json.loads(line) for line in Path(lines["file"]).read_text().splitlines()]
    for side in ("chosen", "rejected"):
        assert float(lines[f"reward of {side} answers"]) == pytest.approx(
            np.mean([pair[f"gold_{side}"] for pair in pairs]), abs=5e-4
        )
    assert lines["prompts"] == "12, 5 answers each"
    assert int(lines["pairs"]) == len(pairs)
    assert int(lines["pairs of equal reward, left out"]) == summary["ties_dropped"]
    agree = np.mean([pair["gold_chosen"] > pair["gold_rejected"] for pair in pairs])
    assert 0 < agree < 1 and float(lines["labels that agree with the reward"]) == pytest.approx(agree, abs=5e-4)
    assert lines["noise of the labels"] == "flipped with probability 0.4"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    table = shown(capsys, "preferences=flip", "preferences.flip_probability=0.4", f"run_dir={tmp_path / 'b'}")
    for name, value in lines.items():
        assert name in table and (name == "file" or value in table)
    assert "┃" in table and f"reward_model.path={tmp_path / 'b' / 'preferences.jsonl'}" in table


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("default", PreferencesConfig()),
        ("bradley_terry", PreferencesConfig(noise="bradley_terry")),
        ("flip", PreferencesConfig(noise="flip", flip_probability=0.1)),
    ],
)
def test_the_presets_are_labellers(preset: str, expected: PreferencesConfig) -> None:
    assert load_config([f"preferences={preset}"]).preferences == expected


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("preferences.num_prompts=0", "preferences.num_prompts=0 is out of range; allowed: >= 1 and <= 100000000."),
        ("preferences.num_prompts=1000", "num_prompts=1000 is more than the task's training prompts"),
        ("preferences.noise=bradley", "did you mean bradley_terry?"),
        ("preferences.noise=flip preferences.flip_probability=0.5", "flip_probability=0.5 is out of range"),
        ("preferences.flip_probability=0.1", "needs preferences.noise=flip, not none"),
        ("preferences.temperature=2", "needs preferences.noise=bradley_terry, not none"),
        ("preferences.noise=bradley_terry preferences.temperature=0", "temperature=0.0 is out of range"),
        ("preferences.nois=flip", "did you mean preferences.noise?"),
        (
            "preferences.num_generations=1",
            "preferences.num_generations=1 is out of range; allowed: >= 2 and <= 100000.",
        ),
        ("run_dir=/dev/null/here", "cannot be written"),
    ],
)
def test_nonsense_is_one_sentence(typed: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "sample_answers", lambda *_: pytest.fail("answers were sampled"))
    with pytest.raises(ConfigError) as caught:
        run_preferences(load_config([*SMALL, *typed.split()]))
    assert words in str(caught.value)


def test_answers_that_are_cut_off_or_empty_are_left_out(tmp_path: Path) -> None:
    """With one token an answer is the end token alone, or has no end."""
    with pytest.raises(AsyncRLHFError) as caught:
        run_preferences(load_config([*SMALL, "generator.max_completion_length=1", f"run_dir={tmp_path}"]))
    found = re.match(
        r"No pair is left of 60 answers: (\d+) were cut off at generator\.max_completion_length=1, (\d+) were empty, "
        r"0 have no reward, and 0 pairs have equal rewards\.$",
        str(caught.value),
    )
    assert found and int(found[1]) + int(found[2]) == 60
    assert not (tmp_path / "preferences.jsonl").exists()


def test_scores_that_fail_are_counted_and_too_many_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(share: float) -> Any:
        honest = stage.score

        def score(config: Any, rollouts: list[Rollout]) -> list[list[Any]]:
            from asyncrlhf.types import Annotation

            cut = int(share * len(rollouts))
            lost = [Annotation(r.rollout_id, None, error="the judge is asleep") for r in rollouts[:cut]]
            return [lost + honest(config, rollouts[cut:])[0]]

        return score

    with monkeypatch.context() as patch:
        patch.setattr(stage, "score", failing(0.2))
        done = run_preferences(load_config([*SMALL, f"run_dir={tmp_path / 'some'}"]))
        ended = done["answers"] - done["truncated_dropped"] - done["empty_dropped"]
        assert done["failed"] == int(0.2 * ended)
    monkeypatch.setattr(stage, "score", failing(0.9))
    with pytest.raises(AsyncRLHFError, match="have no reward: the judge is asleep"):
        run_preferences(load_config([*SMALL, f"run_dir={tmp_path / 'most'}"]))
