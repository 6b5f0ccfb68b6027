"""Episodes of each engine, across weight updates: what it sampled is in the row, with its log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.types import Rollout
from tests.loop import run
from tests.vllm_tiny import needs_vllm

pytestmark = pytest.mark.more

STEPS, BATCH = 10, 128
TOLERANCE = 1e-4


ENGINES = {
    "hf": (),
    "vllm": ("generator.engine=vllm", "generator.vllm.kv_cache_gb=0.1"),
}


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=[pytest.mark.thorough, *needs_vllm])])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sampled(engine: str) -> dict[tuple[int, int], list[int]]:
    """The ids that the engine gave, by rollout id and turn."""
    return {}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, engine: str, sampled: dict[tuple[int, int], list[int]]) -> Any:
    """The rows of a run's episodes, and the folders of its models by version."""
    folder = tmp_path_factory.mktemp("exact")
    take = EpisodeWorker.sampled

    def noted(self: EpisodeWorker, turns: Any) -> None:
        for turn in turns:
            if isinstance(turn, Rollout):
                sampled[turn.rollout_id, turn.tag] = turn.response_ids.tolist()
        take(self, turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpisodeWorker, "sampled", noted)
        run(
            folder, "episode.environment=tests.worlds:Sums", "reward.kind=environment", f"steps={STEPS}",
            f"batch_size={BATCH}", "num_generations=4", "learner.learning_rate=1e-3", "generator.slots=32",
            "async.on_weight_update=interrupt", "async.max_staleness=4", "learner.virtual_step_seconds=0.05",
            "checkpoint.every=1", "checkpoint.keep=100", f"logging.rollout_tokens={BATCH}",
            "generator.max_completion_length=40", *ENGINES[engine],
        )  # fmt: skip
    models = {int(path.name.rpartition("-")[2]): path / "learner/model" for path in folder.glob("checkpoints/step-*")}
    return pd.read_parquet(folder / "rollout_tokens"), {0: Path(resolve(ModelConfig().path)), **models}


@pytest.mark.in_turn
def test_each_sampled_id_is_the_engines(rows: Any, sampled: dict[tuple[int, int], list[int]]) -> None:
    found, _ = rows
    assert len(found) > 1000
    for row in found.itertuples():
        own = np.asarray(row.response_ids)[np.asarray(row.policy_versions) >= 0].tolist()
        turns = [sampled[key] for key in sorted(key for key in sampled if key[0] == row.rollout_id)]
        assert own == [token for turn in turns for token in turn]


@pytest.mark.in_turn
def test_each_log_prob_is_that_of_the_row_at_its_version(rows: Any) -> None:
    found, models = rows
    checked = mixed = 0
    worst = 0.0
    for version, folder in models.items():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        of_it = [row for row in found.itertuples() if version in row.policy_versions]
        for start in range(0, len(of_it), 64):
            batch = of_it[start : start + 64]
            texts = [[*row.prompt_ids, *row.response_ids] for row in batch]
            ids = torch.zeros(len(batch), max(map(len, texts)), dtype=torch.long)
            for place, text in enumerate(texts):
                ids[place, : len(text)] = torch.tensor(text)
            with torch.no_grad():
                logprobs = model(ids).logits.float().log_softmax(-1)
            for place, row in enumerate(batch):
                first, versions = len(row.prompt_ids), np.asarray(row.policy_versions)
                at = np.flatnonzero(versions == version)
                own = logprobs[place, first - 1 + torch.tensor(at)]
                recomputed = own.gather(1, torch.tensor(np.asarray(row.response_ids)[at])[:, None])[:, 0].numpy()
                worst = max(worst, float(np.abs(recomputed - np.asarray(row.behavior_logprobs)[at]).max()))
                checked += len(at)
                mixed += len(set(versions[versions >= 0])) > 1
    assert checked == sum(int((np.asarray(row.policy_versions) >= 0).sum()) for row in found.itertuples())
    assert mixed > 100, "many episodes outlived a version"
    assert worst < TOLERANCE
