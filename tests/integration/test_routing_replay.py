"""Routing replay over the learner's ranks against one plain rank, and in whole runs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.records.write.saved_rollouts import read_rollouts
from asyncrlhf.types import TrainBatch
from tests.integration.test_exact_resume import killed_and_resumed, told
from tests.loop import QUIET, run
from tests.mixtures import checkpoint, mixture, random_routes
from tests.numeric import assert_close
from tests.unit.learner.ranks import COMMON, batches, run_ranks, share, weights
from tests.unit.learner.worlds import VOCABULARY

KL = AlgorithmConfig(kl="loss", beta=0.1)  # the reference chooses its experts itself
CASES: dict[str, dict[str, Any]] = {
    "copies": {},
    "tensor": {"tensor_parallel_size": 2},
    "expert": {"expert_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "fsdp2": {"sharding": "fsdp2", "gradient_checkpointing": True},
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero 3": {"backend": "deepspeed", "zero_stage": 3},
    "ulysses": {"backend": "deepspeed", "zero_stage": 1, "sequence_parallel_size": 2},
}


def given() -> list[TrainBatch]:
    """In the second a rank has no sequences."""
    made = []
    for seed, batch in enumerate(batches(3)):
        routes = random_routes(batch, 2, 8, 2, seed)
        routes[batch.cu_seqlens[1:] - 1] = 0
        made.append(replace(batch, routed_experts=routes))
    return made


def build(rank: int = 0, ranks: int = 1, **learner: Any) -> TorchBackend:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "mlp_only_layers": []}
    config = LearnerConfig(ranks=ranks, **(COMMON | {"max_grad_norm": 0.1, "routing_replay": True} | learner))
    spec = BackendSpec(learner=config, algorithm=KL, steps=10)
    return TorchBackend(mixture(**sizes), spec, reference=mixture(**sizes), rank=rank, ranks=ranks)


def curve(trained: TorchBackend) -> list[dict[str, float]]:
    shares = trained.config.shares
    mine = trained.rank * shares // trained.ranks
    return [trained.train_step(share(batch, mine, shares)).metrics for batch in given()]


def job(rank: int, ranks: int, cases: dict[str, dict[str, Any]]) -> Any:
    found = {}
    for name, settings in cases.items():
        trained = build(rank, ranks, **settings)
        found[name] = (curve(trained), weights(trained))
    return found


def check(found: list[Any], cases: dict[str, Any]) -> None:
    alone = build()
    expected, whole = curve(alone), weights(alone)
    assert all(metrics["routes_changed"] > 0.5 for metrics in expected), "no router chose the random experts"
    for name in cases:
        for rank in found:
            for metrics, wanted in zip(rank[name][0], expected, strict=True):
                for key in ("loss", "grad_norm", "entropy"):
                    assert_close(metrics[key], wanted[key], atol=1e-4, rtol=1e-4, what=f"{name} {key}")
                # Ranks of one sequence may pass a filling token.
                assert_close(metrics["routes_changed"], wanted["routes_changed"], atol=0.02, what=name)
        for key, tensor in whole.items():
            assert_close(found[0][name][1][key], tensor, atol=1e-4, what=f"{name} {key}")


@pytest.mark.thorough
def test_two_ranks_follow_the_experts_as_one_does() -> None:
    check(run_ranks(job, 2, 2, CASES), CASES)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_follows_them_too() -> None:
    check(run_ranks(job, 2, 2, DEEPSPEED), DEEPSPEED)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mixture") / "model")


REPLAY = (
    "learner.routing_replay=true", "generator.engine=hf", "steps=4", "batch_size=16", "num_generations=4",
    "generator.slots=16", "generator.max_completion_length=6", "learner.learning_rate=1e-2",
    "reward.kind=python", "reward.target=tests.reward_functions:one_for_digits",
)  # fmt: skip


def test_a_run_follows_the_generators_experts_and_reports_how_often_they_changed(tmp_path: Path, moe: Path) -> None:
    """On policy nothing changes; two steps behind, the learner would choose other experts, and does not."""
    sync = run(tmp_path / "sync", *REPLAY, f"model.path={moe}", "async.mode=sync")
    assert all(row["routes_changed"] < 0.01 for row in sync.metrics), "a near tie may fall either way"
    assert any(row["grad_norm"] > 0 for row in sync.metrics)
    late = ("async.mode=fixed_lag", "async.lag=2", "steps=6")
    done = run(tmp_path / "late", *REPLAY, f"model.path={moe}", *late)
    assert all(row["routes_changed"] > 0.02 for row in done.metrics[3:])
    free = run(tmp_path / "free", *REPLAY, f"model.path={moe}", *late, "learner.routing_replay=false")
    assert all("routes_changed" not in row for row in free.metrics)


@pytest.mark.in_turn
@pytest.mark.more
def test_waiting_rollouts_keep_their_experts_over_a_kill(tmp_path: Path, moe: Path) -> None:
    late = ("async.mode=fixed_lag", "async.lag=2", "checkpoint.every=2", "checkpoint.resume=auto")
    options = (*REPLAY, f"model.path={moe}", *late)
    whole = run(tmp_path / "whole", *options)
    waiting = read_rollouts(whole.folder / "checkpoints" / "step-00000002" / "rollouts.arrow")
    assert waiting and all(rollout.routed_experts is not None for rollout in waiting.values())
    again = killed_and_resumed(tmp_path / "killed", whole, 0, *options)  # twice between the steps 2 and 4
    for one, other in zip(told(again), told(whole), strict=True):
        assert one == other
    with pytest.raises(ConfigError, match=r"learner\.routing_replay"):
        run(tmp_path / "killed", *options, "steps=8", "learner.routing_replay=false")


REFUSED = {
    "generator.engine=fake": r"generator\.engine=fake does not report them; allowed: engine=hf",
    "generator.engine=vllm": r"generator\.gpus=0 with engine=vllm, which cannot on a CPU, does not",
    "generator.engine=vllm generator.gpus=1 generator.vllm.engine_kwargs={enable_prefix_caching:false}": "_caching=f",
    "generator.engine=vllm generator.gpus=2 generator.vllm.pipeline_parallel_size=2": "vllm.pipeline_parallel_size=2",
    "generator.engine=vllm generator.gpus=1 generator.stop=[x]": r"generator\.stop=\['x'\] with engine=vllm",
    "generator.groups={a:{engine:hf},b:{engine:fake}}": r"generator\.engine=fake does not report",
    "learner.compile=true": "learner.routing_replay does not work with learner.compile",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_replicas_that_cannot_report_the_experts_are_refused(settings: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[settings]) as caught:
        load_config(["learner.routing_replay=true", *settings.split()])
    assert str(caught.value).count(". ") == 0


def test_a_dense_model_is_refused_before_any_actor_starts(tmp_path: Path) -> None:
    config = load_config([*QUIET, f"run_dir={tmp_path / 'run'}", "learner.routing_replay=true", "generator.engine=hf"])
    with pytest.raises(ConfigError, match="of the kind llama has no experts"):
        prepare(config)
    assert not (tmp_path / "run").exists()
