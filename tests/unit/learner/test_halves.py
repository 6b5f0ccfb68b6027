"""Passes in bfloat16 over float32 weights that are cast once an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.learner.asleep import RankSleep
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.numeric import assert_close
from tests.unit.learner.worlds import backend, gradients, llama, random_batch

PPO = AlgorithmConfig(advantage="gae", kl="loss", beta=0.1)
SLOW = AlgorithmConfig(advantage="vtrace", anchor="ema", ema_decay=0.5)


def half(algorithm: AlgorithmConfig | None = None, **learner: Any) -> TorchBackend:
    config = LearnerConfig(**({"learning_rate": 1e-2, "token_budget": 40, "mixed_precision": "bfloat16"} | learner))
    reference = llama(seed=5) if algorithm is not None and algorithm.needs_reference else None
    return backend(algorithm, config, reference=reference)


def weights(trained: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained.parameters().items()}


def test_the_passes_are_those_of_a_model_loaded_in_bfloat16() -> None:
    trained, given = half(), [torch.arange(1, 12).numpy()]
    loaded = llama().to(torch.bfloat16)
    logits = loaded(torch.from_numpy(given[0])[None]).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(given[0][1:, None]))[:, 0].detach()
    assert_close(trained.score(given)[0], expected.numpy(), atol=0.06)  # two steps of such logits
    assert {p.dtype for p in trained.parameters().values()} == {torch.float32}
    assert {p.dtype for p in trained.model.state_dict().values()} == {torch.float32}


def test_updates_below_the_resolution_of_bfloat16_add_up() -> None:
    """A weight near 1 has steps of 0.004 to 0.008 there: of updates of 1e-4, thirty-two make a step, one makes none."""
    trained, batch = half(learning_rate=1e-4, max_grad_norm=0.0), random_batch()
    norm = trained.model.model.norm.weight
    first = norm.detach().clone()
    for _ in range(32):
        trained.train_step(batch)
    moved = (norm.detach() - first).abs()
    assert moved.max() > 1e-3 and bool((norm.detach() != norm.detach().bfloat16().float()).any())


def test_gradients_of_microbatches_add_up_in_float32() -> None:
    """Sums of bfloat16 would lose what is small beside what came first."""
    batch = random_batch(groups=8)
    still = {"learning_rate": 0.0, "max_grad_norm": 0.0}
    many, one = half(token_budget=20, **still), half(token_budget=10_000, **still)
    exact = backend(learner=LearnerConfig(**still, token_budget=10_000))
    for trained in (many, one, exact):
        trained.train_step(batch)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in many.model.parameters())
    apart = [
        max(float((a - b).norm() / b.norm()) for a, b in zip(g.values(), gradients(exact).values(), strict=True))
        for g in (gradients(many), gradients(one))
    ]
    assert apart[0] < 1.5 * apart[1] + 0.01 and apart[1] < 0.06


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), PPO, SLOW], ids=["grpo", "critic and reference", "slow copy"])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(algorithm: AlgorithmConfig, tmp_path: Path) -> None:
    whole, begun, resumed = half(algorithm), half(algorithm), half(algorithm)
    batches = [random_batch(seed=seed) for seed in range(4)]
    for batch in batches:
        whole.train_step(batch)
    for batch in batches[:2]:
        begun.train_step(batch)
    begun.save(tmp_path)
    resumed.score([batches[0].token_ids[:9]])  # passes before the load see other weights
    resumed.load(tmp_path)
    for batch in batches[2:]:
        resumed.train_step(batch)
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(whole).items())


def test_weights_that_were_changed_in_place_are_seen_by_the_next_pass() -> None:
    trained, text = half(), [torch.arange(1, 12).numpy()]
    before = trained.score(text)[0]
    with torch.no_grad():
        for parameter in trained.parameters().values():
            parameter.mul_(0.5)
    assert abs(trained.score(text)[0] - before).max() > 0.05


def test_an_optimizer_that_torch_does_not_know_of_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other libraries write through addresses, of which torch's version counters do not know."""
    trained, batch, text = half(), random_batch(), [torch.arange(1, 12).numpy()]
    before = trained.score(text)[0]

    def step() -> None:
        for parameter in trained.model.parameters():
            parameter.data.numpy()[...] *= 0.5

    monkeypatch.setattr(trained.updater.optimizer, "step", step)
    trained.train_step(batch)
    assert abs(trained.score(text)[0] - before).max() > 0.05


def test_asleep_no_cast_is_held() -> None:
    trained = half(PPO)
    trained.train_step(random_batch())
    trained.score([torch.arange(1, 12).numpy()])
    layer = trained.model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.bfloat16
    sleep = RankSleep(trained)
    sleep.sleep()
    assert "weight" not in vars(layer)
    sleep.wake()
    trained.train_step(random_batch(seed=1))
    assert layer.weight.dtype == torch.float32  # dropped by the update


class Scaled(torch.nn.Module):
    """Multiplies by a float32 number, as old checkpoints' code does: its result is float32 whatever comes in."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * self.scale


def test_a_model_that_cannot_do_without_autocast_keeps_it_and_says_so() -> None:
    model = llama()
    model.model.layers[0].post_attention_layernorm = Scaled(model.model.layers[0].post_attention_layernorm)
    config = LearnerConfig(learning_rate=1e-2, mixed_precision="bfloat16")
    trained = backend(learner=config, model=model)
    assert "by autocast" in trained.note and "dtype" in trained.note
    assert not trained.halves and not trained.train_step(random_batch()).skipped


def test_a_lora_adapter_trains_over_cast_weights(tmp_path: Path) -> None:
    from asyncrlhf.data.data_config import LoraConfig
    from asyncrlhf.models.adapter import add_adapter

    config = LearnerConfig(learning_rate=1e-2, mixed_precision="bfloat16")
    trained = backend(learner=config, model=add_adapter(llama(), LoraConfig(r=2)))
    before = weights(trained)
    trained.train_step(random_batch())
    trained.score([torch.arange(1, 12).numpy()])
    trained.save(tmp_path)
    assert {tensor.dtype for tensor in weights(trained).values()} == {torch.float32}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trained).items())
