"""A learner that sleeps between its turns leaves nothing on its device, and goes on as if it had never slept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.learner.asleep import RankSleep
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.offload import Depot, FileDepot, HostDepot, Offload, storages
from tests.unit.learner.worlds import backend, llama, random_batch

PPO = AlgorithmConfig(advantage="gae", kl="loss", beta=0.1)  # with a critic and a reference
STEPS = 4


def anonymous() -> int:
    """Private memory of this process without that of files, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def trained(depot: Depot | None, **learner: Any) -> tuple[TorchBackend, list[dict[str, float]]]:
    """After ``STEPS`` steps; with a ``depot`` it slept after each of them."""
    rank = backend(PPO, LearnerConfig(learning_rate=1e-2, **learner), model=llama(), reference=llama(seed=1))
    sleeper = RankSleep(rank, depot)
    metrics = []
    for seed in range(STEPS):
        metrics.append(rank.train_step(random_batch(seed=seed)).metrics)
        if depot is not None:
            awake = sleeper.kept_bytes()
            sleeper.sleep()
            assert sleeper.kept_bytes() == 0 < awake, "something stayed on the device"
            assert not isinstance(depot, HostDepot) or not any(s.nbytes() for s in storages(held(rank), rank.device))
            assert all(parameter.grad is None for parameter in rank.model.parameters())
            sleeper.wake()
            assert sleeper.kept_bytes() == awake
    return rank, metrics


def held(rank: TorchBackend) -> list[torch.Tensor]:
    """What a rank is sure to have, counted without its help."""
    assert isinstance(rank.reference, torch.nn.Module) and rank.critic is not None
    parts = [part for optimizer in rank.updater.optimizers for part in getattr(optimizer, "parts", [optimizer])]
    moments = [state[name] for part in parts for state in part.state.values() for name in state if "exp_avg" in name]
    assert moments
    return [*rank.model.parameters(), *rank.critic.parameters(), *rank.reference.parameters(), *moments]


def states(rank: TorchBackend) -> list[torch.Tensor]:
    """Everything that the next step depends on."""
    return [tensor.detach().clone() for tensor in RankSleep(rank)._tensors()]


@pytest.mark.in_turn
@pytest.mark.parametrize("learner", [{}, {"optim": "muon"}, {"sharding": "fsdp2"}], ids=["adamw", "muon", "fsdp2"])
@pytest.mark.parametrize("depot", [HostDepot, FileDepot])
@pytest.mark.more_but(every=3)
def test_a_learner_that_slept_goes_on_bit_for_bit(depot: Any, learner: dict[str, Any]) -> None:
    (slept, one), (stayed, other) = trained(depot(), **learner), trained(None, **learner)
    assert one == other
    pairs = list(zip(states(slept), states(stayed), strict=True))
    # Policy, critic and reference, and two moments and a count of each trained parameter (Muon has one moment).
    assert len(pairs) > 3 * len(list(slept.model.parameters()))
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("depot", [HostDepot, FileDepot])
def test_what_has_views_and_what_a_loader_mapped_comes_back_into_its_place(depot: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = type(llama()).from_pretrained(tmp_path)
    if depot is HostDepot:
        model = model.double()  # off a GPU; there no loader's mapping is left
    views = [parameter.data.view(-1)[1:] for parameter in model.parameters()]
    before = [view.clone() for view in views]
    offload = Offload(torch.device("cpu"), depot())
    for _ in range(2):
        offload.out(model.parameters())
        offload.out(model.parameters())  # nothing is away twice
        assert offload.resident_bytes(model.parameters()) == 0
        offload.back()
        offload.back()
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))


def test_on_a_cpu_the_pages_go_back_to_the_system() -> None:
    size = 32 << 20
    tensor = torch.ones(size, dtype=torch.uint8)
    offload, before = Offload(torch.device("cpu")), anonymous()
    offload.out([tensor])
    assert before - anonymous() > 0.9 * size
    offload.back()
    assert bool((tensor == 1).all())
