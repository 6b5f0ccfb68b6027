"""Every preset in conf/algorithm, and every KL placement, takes real steps through the whole loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.errors import AsyncRLHFError
from tests.loop import FAKE, run
from tests.numeric import FLOAT32, assert_close

PRESETS = sorted(path.stem for path in (conf_folder() / "algorithm").glob("*.yaml"))


TEACHER = ("reference.path=tiny", "model.model_init_kwargs={num_hidden_layers: 2}")


@pytest.mark.in_turn
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.more_but("asymre", "best_of_n", "grpo", "gspo", "online_dpo", "opmd", "ppo", "rloo", "topr", "vtrace")
@pytest.mark.thorough_but(every=4)
def test_preset_trains(tmp_path: Path, preset: str) -> None:
    more = TEACHER if preset == "distill" else ()
    done = run(tmp_path, *FAKE, f"algorithm={preset}", "steps=2", "async.mode=one_step", *more)
    done.assert_ledger_whole()
    for row in done.metrics:
        assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) and row["skipped"] == 0
        assert 0 < row["ess_fraction"] <= 1 and 0 < row["effective_learning_rate"] <= row["learning_rate"]


COMMON = (
    *FAKE, "steps=3", "async.mode=sync", "learner.learning_rate=1e-3", "generator.fake.correct_probability=0.3",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the last step without a KL."""
    return float(run(tmp_path_factory.mktemp("plain"), *COMMON).metrics[-1]["loss"])


@pytest.mark.parametrize(
    ("place", "estimator"), [("reward", "auto"), ("reward", "k1"), ("loss", "auto"), ("loss", "k1"), ("loss", "k3")]
)
@pytest.mark.more_but(every=2)
def test_kl_is_counted_where_it_is_put(tmp_path: Path, plain_loss: float, place: str, estimator: str) -> None:
    kl = ("algorithm.beta=0.5", f"algorithm.kl={place}", f"algorithm.kl_estimator={estimator}")
    held = run(tmp_path, *COMMON, *kl)
    assert_close(held.metrics[0]["ref_kl"], 0, atol=FLOAT32, what="the first step starts at the reference")
    assert held.metrics[-1]["ref_kl"] > 0
    assert held.metrics[-1]["loss"] != plain_loss


def test_maxrl_ends_at_a_reward_below_zero(tmp_path: Path) -> None:
    """Its unit is a group's mean: with -1 and 1.01 the advantages would be some hundreds."""
    reward = ("reward.kind=python", "reward.target=tests.reward_functions:minus_length")
    with pytest.raises(AsyncRLHFError, match=r"algorithm=maxrl: .* a rollout earned -\d"):
        run(tmp_path, *FAKE, "algorithm=maxrl", "steps=2", "async.mode=one_step", *reward)
