"""Whole runs whose reward model reads ahead: every score is that of the whole rollout, whatever happens on the way."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from asyncrlhf.cluster.local_runtime import LocalAnnotator, LocalRuntime, fetch_local
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.cluster.ray_handles import RayAnnotator
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.readahead.readers import ReadingModel
from asyncrlhf.rewards.model import ModelSource
from asyncrlhf.rewards.reward_config import GRANULARITIES, RewardModelConfig
from asyncrlhf.types import Annotation, Payload, Rollout
from tests import ray_run
from tests.integration.test_local_loop import TAIL, kill_at
from tests.loop import FAKE, meddle, run
from tests.numeric import FLOAT32, assert_close
from tests.unit.rewards.worlds import save_reward_model

# Hot and short enough for responses that do not end by themselves.
SHORT = (
    "batch_size=16",
    "num_generations=4",
    "learner.learning_rate=1e-4",
    "fusion.chunk_tokens=3",
    "generator.temperature=3",
    "generator.max_completion_length=7",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rm"), 19, context=128)


@pytest.fixture(scope="module")
def whole(folder: Path) -> ModelSource:
    """The reward model on whole rollouts."""
    config = RewardModelConfig(path=str(folder), inputs="ids")
    return ModelSource(config, "reward", load_tokenizer(ModelConfig()), max_batch_tokens=4096)


class Checked:
    """Every score that reward workers give, beside that of the whole rollout."""

    def __init__(self, whole: ModelSource) -> None:
        self._whole = whole
        self.rollouts: list[Rollout] = []

    def check(self, rollouts: Sequence[Rollout], results: Sequence[Annotation]) -> None:
        expected = self._whole.scores(rollouts)
        assert [r.rollout_id for r in results] == [r.rollout_id for r in rollouts]
        assert_close([r.reward for r in results], expected, atol=FLOAT32)
        self.rollouts += rollouts


@pytest.fixture
def checked(whole: ModelSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    seen = Checked(whole)
    local, remote = LocalAnnotator.annotate, RayAnnotator.annotate

    async def annotate_locally(self: LocalAnnotator, payloads: Sequence[Payload], *_: Any) -> list[Annotation]:
        results = await local(self, payloads)
        seen.check(fetch_local(payloads), results)
        return results

    async def annotate_remotely(self: RayAnnotator, payloads: Sequence[Payload], *_: Any) -> list[Annotation]:
        results = await remote(self, payloads)
        seen.check([ray.get(p.ref)[p.index] for p in payloads], results)
        return results

    monkeypatch.setattr(LocalAnnotator, "annotate", annotate_locally)
    monkeypatch.setattr(RayAnnotator, "annotate", annotate_remotely)
    yield seen
    assert seen.rollouts, "nothing was scored"


def model_of(folder: Path) -> tuple[str, ...]:
    return "reward.kind=model", f"reward.model.path={folder}", "reward.model.inputs=ids"


def readers_of(runtime: LocalRuntime) -> list[ReadingModel]:
    workers: Any = runtime.rewards
    return [reader for handle in workers for reader in handle.worker.readers]


def test_the_four_granularities_give_the_same_rewards(tmp_path: Path, folder: Path, checked: Checked) -> None:
    """The first step's rollouts are the same for all; what differs is when they are scored."""
    rewards: dict[str, list[float]] = {}
    for granularity in GRANULARITIES:
        done = run(
            tmp_path / granularity, *SHORT, *model_of(folder), "steps=1", "async.mode=sync", f"fusion={granularity}",
        )  # fmt: skip
        rewards[granularity] = done.trained.reward.tolist()
        (row,) = done.metrics
        assert row["reward_latency_p95"] >= row["reward_latency_p50"] >= 0
        assert ("prefilled_fraction" in row) == (granularity == "chunk")
    for granularity in GRANULARITIES:
        assert len(rewards[granularity]) == 16
        assert_close(rewards[granularity], rewards["batch"], atol=FLOAT32)


@pytest.mark.in_turn
@pytest.mark.parametrize("update", ["in_flight", "interrupt"])
@pytest.mark.more_but(every=2)
def test_rollouts_that_change_version_in_mid_sequence_keep_what_was_read(
    tmp_path: Path, folder: Path, checked: Checked, update: str
) -> None:
    """Two workers with room for half of what is under way."""
    done = run(
        tmp_path, *SHORT, *model_of(folder), "steps=6", "fusion=chunk", "fusion.cache_tokens=256", "reward.workers=2",
        f"async.on_weight_update={update}", "generator.slots=16", "learner.virtual_step_seconds=0.05",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert any(r.policy_versions.min() < r.policy_versions.max() for r in checked.rollouts)
    assert {r.finish_reason for r in checked.rollouts} == {"stop", "length"}
    assert max(row["prefilled_fraction"] for row in done.metrics) > 0.2
    assert sum(row["prefill_evictions"] for row in done.metrics) > 0


def test_a_killed_generator_leaves_nothing_wrong_behind(
    tmp_path: Path, folder: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had sampled is sampled again, by another version to another end."""
    meddle(monkeypatch, kill_at(0.12, 0.31))
    done = run(
        tmp_path, *SHORT, *model_of(folder), "steps=6", "fusion=chunk", "generator.replicas=2", "generator.slots=16",
        "learner.virtual_step_seconds=0.05",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert sum(r.generator_id == "generator-0" for r in checked.rollouts) > 0
    assert max(row["prefilled_fraction"] for row in done.metrics) > 0.2


@pytest.mark.in_turn
@pytest.mark.more
def test_dropped_stragglers_are_forgotten(
    tmp_path: Path, folder: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes = meddle(monkeypatch, lambda runtime: None)
    done = run(
        tmp_path, *FAKE, *TAIL, *model_of(folder), "steps=40", "fusion=chunk", "fusion.chunk_tokens=3",
        "generator.replicas=2", "async.max_staleness=1", "learner.virtual_step_seconds=0.1",
    )  # fmt: skip
    done.assert_ledger_whole()
    rows = done.rollouts
    dropped = rows[(rows.state == "dropped") & (rows.drop_reason == "stale")]
    assert len(dropped) > 0, "the tail was meant to be met by the bound"
    (reader,) = readers_of(runtimes[0])
    before_the_end = set(dropped.rollout_id[dropped.rollout_id < rows.rollout_id.max() - 200])
    assert before_the_end and not before_the_end & set(reader._readings)
    assert not set(done.trained.rollout_id) & set(reader._readings), "what was scored is forgotten"


def test_where_nothing_can_read_ahead_rollouts_are_scored_at_their_end(tmp_path: Path, folder: Path) -> None:
    prepared = prepare(load_config([f"run_dir={tmp_path}", "runtime=local", "fusion=chunk"]))
    (note,) = prepared.notes
    assert "needs a causal reward model, and this reward has none (kind task)" in note
    assert prepared.config.fusion.granularity == "rollout"
    runtime = build_runtime(prepared.config)
    assert isinstance(runtime, LocalRuntime)
    assert [spec.chunk_tokens for spec in runtime._specs.generators] == [0]
    assert runtime._specs.reward.cache_tokens == 0
    prepared = prepare(load_config([f"run_dir={tmp_path}", "runtime=local", "fusion=chunk", *model_of(folder)]))
    assert not prepared.notes and prepared.config.fusion.granularity == "chunk"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("fusion.granularity=chunks", r"fusion\.granularity=chunks .*allowed: batch, group, rollout, chunk"),
        ("fusion.chunk_tokens=0", r"fusion\.chunk_tokens=0 .*allowed: >= 1"),
        ("fusion.cache_tokens=10", r"fusion\.cache_tokens=10 does not hold one chunk of fusion\.chunk_tokens=64"),
        ("fusion.cache_token=10", r"fusion\.cache_token is not a setting \(did you mean fusion\.cache_tokens\?\)"),
        ("fusion.chunk_tokens=many", r"fusion\.chunk_tokens=many is of the wrong kind; allowed: a whole number"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config([setting])


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_under_ray_a_reward_worker_may_die_with_all_that_it_has_read(
    tmp_path: Path, folder: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers; the first is killed as it is about to read ahead, then a generator dies in the midst of sampling."""
    struck: list[str] = []
    original = RayAnnotator.prefill

    async def prefill(self: RayAnnotator, released: Any, chunks: Any) -> Any:
        answer = await original(self, released, chunks)
        if chunks and self.name not in struck:
            struck.append(self.name)
            await ray_run.strike(self.actor, signal.SIGKILL)
        return answer

    monkeypatch.setattr(RayAnnotator, "prefill", prefill)
    done = ray_run.run(
        tmp_path, *SHORT, *model_of(folder), "steps=6", "fusion=chunk", "fusion.chunk_tokens=8", "reward.workers=2",
        "generator.max_completion_length=96", "generator.ignore_eos=true", "model.path=tiny",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert struck and len(checked.rollouts) >= 6 * 16
    assert max(row["prefilled_fraction"] for row in done.metrics) > 0
