"""Which models' experts can be reported and followed, and the arrays that carry them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.packing import pack, select
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.pretrained import check_routers
from asyncrlhf.models.routes import Routers
from asyncrlhf.records.write.saved_rollouts import read_rollouts, write_rollouts
from asyncrlhf.types import Rollout, TrainSample
from tests.mixtures import FAMILIES, checkpoint, mixture
from tests.unit.learner.worlds import llama, samples


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_router_follows_the_experts_given_and_weighs_them_as_it_would(kind: str) -> None:
    """Given its own choice it returns the same; given another, the weights of exactly those experts."""
    routers = Routers(mixture(kind))
    router = routers.all[-1].module
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, weights, chosen = router(hidden)
        same, imposed = routers.impose(router, chosen, hidden)
        assert torch.equal(same[0], logits) and torch.equal(same[2], chosen)
        torch.testing.assert_close(same[1], weights)
        assert imposed.own is not None and torch.equal(imposed.own, chosen)
        turned, _ = routers.impose(router, chosen.flip(-1), hidden)
        torch.testing.assert_close(turned[1], weights.flip(-1))
        other = (chosen + 1) % routers.experts
        moved, _ = routers.impose(router, other, hidden)
        assert torch.equal(moved[2], other) and not torch.allclose(moved[1], weights)


def test_layers_without_experts_keep_their_place() -> None:
    routers = Routers(mixture("qwen3_moe"))
    assert [router.place for router in routers.all] == [0, 2]
    assert routers.width == 6 and routers.columns(routers.all[1]) == slice(4, 6)
    assert Routers(mixture("qwen3_moe", num_experts=300)).dtype is np.uint16


def test_models_whose_experts_cannot_be_followed_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^learner\.routing_replay=true needs a mixture of experts .*; a model of the kind llama has no",
    ):
        Routers(llama())
    # Its router does not call topk.
    with pytest.raises(ConfigError, match=r"those of a model of the kind phimoe do not"):
        Routers(mixture("phimoe", num_local_experts=8, num_experts_per_tok=2))


def test_a_checkpoint_is_checked_without_its_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not weights")
    check_routers(ModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match="has no experts"):
        check_routers(ModelConfig())


def routed(count: int = 6, width: int = 6) -> list[TrainSample]:
    draws = np.random.default_rng(0)
    made = []
    for sample in samples(groups=count // 3):
        inputs = len(sample.rollout.prompt.token_ids) + len(sample.rollout.response_ids) - 1
        routes = draws.integers(1, 200, (inputs, width)).astype(np.uint8)
        made.append(replace(sample, rollout=replace(sample.rollout, routed_experts=routes)))
    return made


def same(found: Rollout, wanted: Rollout) -> bool:
    assert found.routed_experts is not None and wanted.routed_experts is not None
    alike = found.routed_experts.dtype == wanted.routed_experts.dtype
    return alike and np.array_equal(found.routed_experts, wanted.routed_experts)


def test_packed_routes_stand_with_their_tokens() -> None:
    given = routed()
    batch = pack(given)
    for order in (range(6), [4, 0, 5]):
        part = select(batch, list(order))
        assert part.routed_experts is not None
        for place, index in enumerate(order):
            first, end = part.cu_seqlens[place : place + 2]
            assert np.array_equal(part.routed_experts[first : end - 1], given[index].rollout.routed_experts)
            assert not part.routed_experts[end - 1].any()
    given[1] = replace(given[1], rollout=replace(given[1].rollout, routed_experts=None))
    with pytest.raises(ValueError, match="1 of 6 rollouts lack their experts"):
        pack(given)


def test_routes_survive_transport_and_checkpoint(tmp_path: Path) -> None:
    given = [sample.rollout for sample in routed()]
    wide = replace(given[0], rollout_id=99, routed_experts=given[0].routed_experts.astype(np.uint16) + 300)  # type: ignore[union-attr]
    constructor, arguments = RolloutBundle(given).__reduce__()
    assert all(same(found, wanted) for found, wanted in zip(constructor(*arguments), given, strict=True))
    plain = replace(given[1], rollout_id=50, routed_experts=None)
    write_rollouts(tmp_path / "some.arrow", [*given, wide, plain])
    found = read_rollouts(tmp_path / "some.arrow")
    assert all(same(found[rollout.rollout_id], rollout) for rollout in [*given, wide])
    assert found[50].routed_experts is None
    write_rollouts(tmp_path / "none.arrow", [plain])
    assert read_rollouts(tmp_path / "none.arrow")[50].routed_experts is None


def test_a_rollout_has_the_experts_of_each_of_its_inputs() -> None:
    rollout = routed()[0].rollout
    with pytest.raises(ValueError, match=r"rollout 0: experts of \d+ of \d+ tokens"):
        replace(rollout, routed_experts=rollout.routed_experts[1:])  # type: ignore[index]
