"""Episodes that fork, trained for some steps: each log-prob is that of its branch, read as a text of its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.turns import Fork
from tests.branching import text_of
from tests.loop import Finished, run
from tests.ray_run import run as ray_run

TOLERANCE = 1e-4
# Earlier turns lose small digits, as others lose their thoughts.
LESS = " | ".join(["m.content", *(f"replace('{digit}', '')" for digit in range(1, 5))])
FORGETS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ " + LESS + " }}"
    "{% else %}{{ m.content }}{% endif %} {% endfor %}"
)
SMALL = (
    *("num_generations=4", "generator.slots=16", "generator.max_completion_length=60", "checkpoint.every=1"),
    *("checkpoint.keep=100", "reward.kind=environment", "episode.history=fork", "learner.learning_rate=1e-3"),
)


def forgetful(folder: Path) -> Path:
    made = Path(shutil.copytree(resolve("tiny"), folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = FORGETS
    tokenizer.save_pretrained(made)
    return made


def assert_exact(done: Finished, model: Path, batch: int) -> pd.DataFrame:
    """Of the generator at the versions that sampled, and of the learner in its step."""
    tokens = pd.read_parquet(done.folder / "rollout_tokens")
    rows = tokens.merge(done.trained[["rollout_id", "forks", "turns", "prompt_length"]], on="rollout_id")
    assert len(rows) == len(tokens) == len(done.trained) > 0.8 * batch * len(done.metrics)
    assert (rows.forks.map(len) > 0).mean() > 0.7
    folders = {int(path.name.rpartition("-")[2]): path for path in done.folder.glob("checkpoints/step-*")}
    models: Mapping[int, Any] = {0: model} | {number: path / "learner/model" for number, path in folders.items()}
    loaded = {number: AutoModelForCausalLM.from_pretrained(path).eval() for number, path in models.items()}
    worst = 0.0
    for row in rows.itertuples():
        row_of_ids: Any = SimpleNamespace(
            prompt=SimpleNamespace(token_ids=row.prompt_ids),
            response_ids=row.response_ids,
            forks=[Fork(**fork) for fork in row.forks],
        )
        assert row.prompt_length == len(row.prompt_ids)
        for turn in row.turns:
            here = slice(turn["start"], turn["end"])
            text = torch.tensor([text_of(row_of_ids, row.prompt_length + turn["end"] - 1)])
            count = turn["end"] - turn["start"]
            versions = np.asarray(row.policy_versions)[here]
            given = [(version, row.behavior_logprobs) for version in set(versions)]
            for version, said in [*given, (row.step - 1, row.policy_logprobs)]:
                with torch.no_grad():
                    logprobs = loaded[int(version)](text).logits[0, -count - 1 : -1].float().log_softmax(-1)
                found = logprobs.gather(1, text[0, -count:, None])[:, 0].numpy()
                own = versions == version if said is row.behavior_logprobs else np.full(count, True)
                worst = max(worst, float(np.abs(found - np.asarray(said)[here])[own].max()))
    assert worst < TOLERANCE, f"log-probs differ by {worst}"
    return rows


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.thorough), 4])
def test_a_template_that_forgets(lag: int, tmp_path: Path) -> None:
    model = forgetful(tmp_path)
    done = run(
        tmp_path / "run", *SMALL, f"model.path={model}", "task.chat_template=true", "steps=5", "batch_size=16",
        "episode.environment=tests.worlds:Sums", "async.mode=fixed_lag", f"async.lag={lag}",
        "logging.rollout_tokens=16",
    )  # fmt: skip
    rows = assert_exact(done, model, 16)
    assert (rows.step - 1 - rows.policy_versions.map(lambda v: v[v >= 0].min()) == np.minimum(lag, rows.step - 1)).all()
    assert all(row["forks_mean"] > 0.7 for row in done.metrics)


@pytest.mark.in_turn
@pytest.mark.more
def test_without_forks_the_log_probs_would_be_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has the power to find a learner that reads the row as one text."""
    from asyncrlhf.learner.model import inputs

    model, of_batch = forgetful(tmp_path), inputs.PackedInputs.of_batch.__func__  # type: ignore[attr-defined]

    def plain(cls: Any, batch: Any, *given: Any, **more: Any) -> Any:
        object.__setattr__(batch, "follows", None)
        return of_batch(cls, batch, *given, **more)

    monkeypatch.setattr(inputs.PackedInputs, "of_batch", classmethod(plain))
    done = run(
        tmp_path / "run", *SMALL, f"model.path={model}", "task.chat_template=true", "steps=2", "batch_size=16",
        "episode.environment=tests.worlds:Sums", "logging.rollout_tokens=16",
    )  # fmt: skip
    with pytest.raises(AssertionError, match="log-probs differ by"):
        assert_exact(done, model, 16)


@pytest.mark.more
@pytest.mark.in_turn
@pytest.mark.usefixtures("ray_local")
def test_an_agent_with_a_sub_agent(tmp_path: Path) -> None:
    done = ray_run(
        tmp_path / "run", *SMALL, "steps=4", "batch_size=8", "episode.agent=tests.agents:branches",
        "logging.rollout_tokens=8",
        "async.on_weight_update=interrupt",  # a kept KV cache of older weights gives other log-probs within a turn
    )  # fmt: skip
    rows = assert_exact(done, Path(resolve("tiny")), 8)
    assert set(rows.forks.map(len)) == {3} and set(rows.turns.map(len)) == {5}
    assert not done.summary["ledger"]["failed"]
