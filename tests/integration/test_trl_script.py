"""An unchanged TRL script's dataset and reward functions train here: columns, None, weights, conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.models.checkpoint_folder import resolve
from tests.loop import run

SCRIPT = "tests.trl_script"
SMALL = ("steps=3", "batch_size=16", "num_generations=4", "algorithm=grpo", "async.mode=sync", "task.kind=prompts")
DATA = (f"task.path={SCRIPT}:build_dataset", "reward.kind=python")


@pytest.fixture
def chatty(tmp_path: Path) -> str:
    """The tiny model with a chat template: a conversation's contents, one behind the other."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("tiny"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return f"model.path={folder}"


def test_it_trains_and_rewards_are_those_of_the_functions(tmp_path: Path, chatty: str) -> None:
    functions = f"reward.reward_funcs=[{SCRIPT}:accuracy_reward,{SCRIPT}:brevity_reward]"
    done = run(tmp_path / "run", *SMALL, *DATA, chatty, functions, "reward.reward_weights=[2.0,0.5]")
    done.assert_ledger_whole()
    assert done.summary["exit_reason"] == "done" and len(done.trained) == 48
    opinions = 0
    for row in done.trained.itertuples():
        a, b = (int(number) for number in row.prompt.removesuffix("=").split("+"))
        expected = 2.0 * (row.response.strip() == str(a + b))
        if len(f"{a}+{b}={a + b}\n#### {a + b}") >= 13:
            opinions += 1
            expected += 0.5 * -0.1 * len(row.response)
        assert row.reward == pytest.approx(expected)
    assert 0 < opinions < 48, "both kinds of prompts were meant to come"
    for metrics in done.metrics:
        shares = metrics["reward/accuracy_reward"], metrics.get("reward/brevity_reward", 0.0)
        assert 0 <= shares[0] <= 1 and shares[1] <= 0
        # A call's mean counts for each of its rollouts, so that calls of all sizes come to the batch's.
        assert metrics["logged/accuracy"] == pytest.approx(shares[0])
    assert any(metrics["grad_norm"] > 0 for metrics in done.metrics)
    for row in done.trained.itertuples():
        assert json.loads(row.extra) == {"golden_answer": str(sum(map(int, row.prompt.removesuffix("=").split("+"))))}


def test_a_rollout_of_no_opinion_is_left_out_and_no_failure(tmp_path: Path, chatty: str) -> None:
    target = "reward.target=tests.reward_functions:no_opinion_of_odd_sums"
    done = run(tmp_path / "run", *SMALL, *DATA, chatty, target, "max_failure_fraction=0", "async.mode=async")
    done.assert_ledger_whole()
    ledger = done.summary["ledger"]
    assert ledger["dropped"]["untrainable"] > 0 and sum(ledger["failed"].values()) == 0
    answers = np.array([sum(map(int, p.removesuffix("=").split("+"))) for p in done.trained.prompt])
    assert (answers % 2 == 0).all() and len(answers) == 48
    left = done.rollouts[done.rollouts.drop_reason.fillna("").str.contains("returned None")]
    assert len(left) == ledger["dropped"]["untrainable"] and left.reward.isna().all()


def test_functions_that_never_have_an_opinion_end_the_run(tmp_path: Path, chatty: str) -> None:
    with pytest.raises(AsyncRLHFError, match=r"None of the last 16 rollouts got a reward.*returned None"):
        run(tmp_path / "run", *SMALL, *DATA, chatty, "reward.target=tests.reward_functions:never_an_opinion")
