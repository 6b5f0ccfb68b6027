"""A student that learns from a teacher's log-probs alone: `experiment=distill_tiny`, at exact lags."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.tasks.build_task import build_task
from experiments.distance import measure
from tests.loop import run

SETTINGS = (
    "experiment=distill_tiny",
    "steps=40",
    "batch_size=64",
    "learner.learning_rate=1e-3",
    "task.heldout_size=64",
)


def heldout_kl(path: str, settings: tuple[str, ...]) -> float:
    """KL(policy || teacher) of sampled held-out answers, in nats an answer, by the whole distributions."""
    config = load_config(list(settings))
    tokenizer = load_tokenizer(config.model)
    student = load_model(ModelConfig(path) if path else config.model)
    teacher, task = load_model(config.reference_model), build_task(config.task, tokenizer)
    length = config.generator.max_completion_length
    return measure(student, teacher, task, tokenizer, samples=4, max_completion_length=length)["kl"]


@pytest.mark.parametrize(
    ("seed", "lag"),
    [(0, 0), pytest.param(1, 4, marks=pytest.mark.thorough), pytest.param(2, 4, marks=pytest.mark.thorough)],
)
def test_the_student_comes_close_to_its_teacher(seed: int, lag: int, tmp_path: Path) -> None:
    done = run(
        tmp_path, *SETTINGS, f"seed={seed}", "runtime=local", "async.mode=fixed_lag", f"async.lag={lag}",
        "checkpoint.at_end=true",
    )  # fmt: skip
    done.assert_ledger_whole()
    (folder,) = done.folder.glob("checkpoints/step-*/learner/model")
    before, after = heldout_kl("", SETTINGS), heldout_kl(str(folder), SETTINGS)
    assert after < 0.4 * before
    assert done.metrics[-1]["ref_kl"] < 0.5 * done.metrics[0]["ref_kl"]
