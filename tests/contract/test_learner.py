"""What every learner backend promises, whatever trains its model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.algorithms.logprobs import token_logprobs
from asyncrlhf.data.packing import select
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.rank_models import UPDATERS
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.step.companions import ServedCritic
from asyncrlhf.learner.step.plan import plan_step
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import VOCABULARY, llama, random_batch, samples

Make = Callable[..., TorchBackend]

ALGORITHMS = {
    "decoupled_grpo": AlgorithmConfig(),
    "ppo with KL": AlgorithmConfig(advantage="gae", kl="reward", beta=0.1, num_iterations=2, minibatches=2),
    "slow target": AlgorithmConfig(advantage="vtrace", anchor="ema", ema_decay=0.5),
    "least variance": AlgorithmConfig(
        advantage="opob", anchor="self", coef="one", correction_level="prod", lr="sqrt_ess", minibatches=2
    ),
    "best against worst": AlgorithmConfig(
        head="pair", advantage="raw", anchor="ref", coef="one", correction="none", aggregate="seq_sum", beta=0.1
    ),
}


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SETTINGS = {
    "torch": {"backend": "torch"},
    "fsdp2": {"backend": "torch", "sharding": "fsdp2"},
    "zero2": {"backend": "deepspeed", "zero_stage": 2},
    "zero3": {"backend": "deepspeed", "zero_stage": 3},
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=needs_deepspeed if settings["backend"] == "deepspeed" else ())
        for name, settings in SETTINGS.items()
    ]
)
def make(request: pytest.FixtureRequest) -> Make:
    def build(algorithm: AlgorithmConfig | None = None, **learner: object) -> TorchBackend:
        config = LearnerConfig(**({"learning_rate": 1e-2, "token_budget": 40} | SETTINGS[request.param] | learner))
        spec = BackendSpec(learner=config, algorithm=algorithm or AlgorithmConfig(), steps=20)
        return TorchBackend(llama(), spec, reference=llama() if spec.algorithm.needs_reference else None)

    return build


def test_every_backend_is_held_to_this() -> None:
    assert {settings["backend"] for settings in SETTINGS.values()} == set(UPDATERS)


def test_a_learner_takes_no_room_for_gradients_that_its_model_lacks(make: Make) -> None:
    """DeepSpeed's own bucket takes 2 GB an engine, and the next fork of such a process, Ray's start, may be refused."""
    make().train_step(random_batch())  # what is imported and allocated once
    process = psutil.Process()
    before = process.memory_info().vms
    make().train_step(random_batch())
    assert process.memory_info().vms - before < 2**29


def test_logits_of_many_tokens_are_never_there_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [learner.train_step(random_batch()).metrics for learner in [make()] for _ in range(2)]
    rows: list[int] = []

    def counted(logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        rows.append(len(logits))
        return token_logprobs(logits, *rest, **options)

    monkeypatch.setattr(forward, "token_logprobs", counted)
    monkeypatch.setattr(forward, "MAX_LOGITS", 5 * VOCABULARY)
    found = [learner.train_step(random_batch()).metrics for learner in [make()] for _ in range(2)]
    assert max(rows) == 5
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_metrics_are_finite_floats_under_the_names_of_the_run_directory(make: Make) -> None:
    metrics = make().train_step(random_batch()).metrics
    wanted = {"loss", "grad_norm", "learning_rate", "entropy", "clip_fraction", "behavior_kl", "ess_fraction"}
    wanted |= {"ess_fraction_seq", "reward_mean", "reward_std", "advantage_std", "truncated_fraction"}
    wanted |= {"masked_token_fraction", "response_length_mean", "zero_spread_groups", "tokens", "sequences"}
    assert wanted <= metrics.keys()
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    batch = random_batch()
    assert metrics["tokens"] == batch.num_tokens and metrics["sequences"] == batch.num_sequences
    assert_close(metrics["reward_mean"], float(batch.rewards.mean()), rtol=1e-5)
    assert_close(metrics["truncated_fraction"], float(batch.truncated.mean()))
    masked = 1 - batch.loss_mask.sum() / batch.response_mask.sum()
    assert_close(metrics["masked_token_fraction"], float(masked), atol=1e-6)


def test_parameters_are_the_models_own_tied_ones_once(make: Make) -> None:
    names = {name for name, _ in llama().named_parameters()}
    assert set(make().parameters()) == names and "lm_head.weight" not in names


def test_score_is_the_log_prob_at_temperature_one(make: Make) -> None:
    texts = [np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7])]
    model = llama()
    for text, found in zip(texts, make().score(texts), strict=True):
        with torch.no_grad():
            logprobs = model(input_ids=torch.from_numpy(text)[None]).logits[0].log_softmax(-1)
        expected = logprobs[np.arange(len(text) - 1), text[1:]]
        assert found.dtype == np.float32
        assert_close(found, expected.numpy(), atol=FLOAT32)


@pytest.mark.in_turn
@pytest.mark.more_but("torch", "zero3")
def test_a_critic_elsewhere_gives_the_values_of_the_learners_own(make: Make) -> None:
    """From its tensors alone, after it has learned; who shards it cannot hand it out and is refused by the config."""
    learner, batch = make(ALGORITHMS["ppo with KL"], critic_learning_rate=1e-2), random_batch()
    assert dict(make().critic_parameters()) == {}
    learner.train_step(batch)
    if learner.shards is not None:
        return
    critic = ServedCritic(llama(), precision="none", token_budget=40)
    critic.load(1, learner.critic_parameters())
    sequences = [sample.rollout for sample in samples()]
    found = np.concatenate(critic.answer(sequences))  # type: ignore[arg-type]
    plan = plan_step(batch, AlgorithmConfig(), 10_000, torch.device("cpu"))
    own = learner._passes.all_values(plan).numpy()
    where = np.concatenate([np.flatnonzero(plan.batch.rollout_ids[plan.tokens.sequence_ids] == i) for i in range(12)])
    assert np.abs(own).max() > 0.01
    assert_close(found, own[where], atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.more_but(every=5)
@pytest.mark.thorough_but(every=4)
def test_steps_move_the_weights_and_resume_goes_on_bit_for_bit(make: Make, tmp_path: Path, name: str) -> None:
    """From a checkpoint whose model is one of transformers."""
    options = {"lr_schedule": "cosine", "warmup_steps": 2}
    learner = make(ALGORITHMS[name], **options)
    batches = [random_batch(seed=seed) for seed in range(5)]
    for version, batch in enumerate(batches[:3]):
        before = {key: tensor.clone() for key, tensor in learner.parameters().items()}
        assert learner.policy_version == version
        result = learner.train_step(batch)
        assert not result.skipped and result.seconds > 0
        assert any(not torch.equal(before[key], tensor) for key, tensor in learner.parameters().items())
    learner.save(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(loaded[key], tensor) for key, tensor in learner.parameters().items())
    assert list((tmp_path / "model").glob("*.safetensors"))
    straight = [learner.train_step(batch).metrics for batch in batches[3:]]
    resumed = make(ALGORITHMS[name], **options)
    resumed.train_step(batches[0])
    resumed.load(tmp_path)
    assert resumed.policy_version == 3
    assert [resumed.train_step(batch).metrics for batch in batches[3:]] == straight
    expected = learner.parameters()
    assert all(torch.equal(expected[key], tensor) for key, tensor in resumed.parameters().items())


@pytest.mark.in_turn
@pytest.mark.more_but("torch")
def test_a_checkpoint_that_does_not_fit_is_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        make().load(tmp_path)
    make().save(tmp_path)
    with pytest.raises(CheckpointError, match="critic"):
        make(ALGORITHMS["ppo with KL"]).load(tmp_path)
    make(ALGORITHMS["ppo with KL"]).save(tmp_path / "critic")
    with pytest.raises(CheckpointError, match=r"algorithm\.anchor disagree on whether there is a ema model"):
        make(ALGORITHMS["slow target"]).load(tmp_path / "critic")


def test_prompts_and_masked_tokens_have_no_say(make: Make) -> None:
    """What the generator reports of a token outside the loss mask changes nothing, not even when it is not finite."""
    batch, other = random_batch(), random_batch()
    other.behavior_logprobs[~other.loss_mask] = np.nan
    one, two = make(), make()
    assert one.train_step(batch).metrics == two.train_step(other).metrics
    expected = one.parameters()
    assert all(torch.equal(expected[key], tensor) for key, tensor in two.parameters().items())


def test_one_sequence_longer_than_the_token_budget_trains(make: Make) -> None:
    batch = select(random_batch(), [0, 1, 2])
    result = make(token_budget=1).train_step(batch)
    assert not result.skipped and result.metrics["sequences"] == 3.0 and batch.token_ids.max() < VOCABULARY
