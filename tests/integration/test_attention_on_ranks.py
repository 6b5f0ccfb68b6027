"""Soft caps, sinks and windows on two ranks that share tokens or heads: what one rank computes."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.sequence import ContextParallel
from asyncrlhf.learner.model.tensor_parallel import deal_out_model
from asyncrlhf.learner.model.ulysses import Ulysses
from asyncrlhf.learner.ranks import Mesh, Peers
from asyncrlhf.learner.updates.deepspeed_updater import _import_deepspeed
from tests.numeric import assert_close
from tests.unit.learner.ranks import run_ranks
from tests.unit.learner.test_attention_kinds import random_model
from tests.unit.learner.worlds import random_batch

RANKS = 2
RING = ("sliding window", "soft cap and windows", "sinks", "sinks and windows")
CASES = [("ring", kind) for kind in RING] + [("heads", kind) for kind in RING] + [("tensor", "sinks")]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def facts(policy: PackedPolicy) -> dict[str, torch.Tensor]:
    """The log-probs of a batch, and the gradients of a mixture of them."""
    logprobs = policy(PackedInputs.of_batch(random_batch(3, 3, longest=30)), 1.0).logprobs
    mixture = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (logprobs * mixture).sum().backward()
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return {"logprobs": logprobs.detach()} | {
        name: gradient for name, gradient in found.items() if gradient is not None
    }


def job(rank: int) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    _import_deepspeed(torch.device("cpu")).init_distributed(auto_mpi_discovery=False)
    made = {}
    for how, kind in CASES:
        policy = PackedPolicy(random_model(kind))
        peers = Peers(rank, RANKS, dist.group.WORLD)
        if how == "tensor":
            sizes = {"replicate": 1, "shard": 1, "pipeline": 1, "expert": 1, "tensor": RANKS}
            deal_out_model(policy.model, Mesh(sizes, torch.device("cpu")))
        else:
            policy.sequence = ContextParallel(peers) if how == "ring" else Ulysses(policy.model, peers)
        found: dict[str, Any] = facts(policy)
        for name, tensor in found.items():
            if isinstance(tensor, DTensor):
                found[name] = tensor.full_tensor()
            elif how != "tensor" and name != "logprobs":
                dist.all_reduce(tensor)
        made[how, kind] = {name: tensor.detach().numpy() for name, tensor in found.items()}
    return made


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[tuple[str, str], dict[str, np.ndarray]]]:
    return run_ranks(job, RANKS)


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "kind"), CASES)
def test_two_ranks_compute_what_one_does(on_ranks: Any, how: str, kind: str) -> None:
    expected = {name: tensor.numpy() for name, tensor in facts(PackedPolicy(random_model(kind))).items()}
    for found in on_ranks:
        assert_close(found[how, kind], expected, rtol=0, atol=0, of_largest=2e-6)  # norms are in float32
