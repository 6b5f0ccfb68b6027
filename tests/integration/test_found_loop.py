"""Whole runs of checkpoints as users bring them: several end tokens, a padded output layer, an adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.models.checkpoint_folder import load_tokenizer
from tests.found import EOS, TOKENS, edit, found
from tests.loop import run
from tests.numeric import FLOAT32, assert_close
from tests.unit.models.test_converted import adapter

HF = (
    "generator.engine=hf", "generator.slots=16", "generator.max_completion_length=12", "steps=2", "batch_size=16",
    "num_generations=4", "learner.learning_rate=1e-3", "generator.temperature=2.0",
)  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("reference", ["learner", "service"])
@pytest.mark.more_but(every=3)
def test_no_answer_goes_on_after_an_end_token_or_holds_an_id_that_no_text_has(
    tmp_path: Path, algorithm: str, reference: str
) -> None:
    config = found(tmp_path / "model", rows=200)
    edit(tmp_path / "model" / "generation_config.json", eos_token_id=[EOS, 5, 7])
    more = ("algorithm.kl=loss", "algorithm.beta=0.1", "logging.rollout_tokens=16", f"reference={reference}")
    made = run(tmp_path / "run", f"model.path={config.path}", *HF, f"algorithm={algorithm}", *more)
    texts = made.rollouts.set_index("rollout_id").response
    tokens = pd.read_parquet(made.folder / "rollout_tokens")
    ended = 0
    assert len(tokens) == 32
    for number, ids in zip(tokens.rollout_id, tokens.response_ids, strict=True):
        assert int(ids.max()) < TOKENS
        assert not np.isin(ids[:-1], [EOS, 5, 7]).any()
        stopped = ids[-1] in (EOS, 5, 7)
        assert stopped or len(ids) == 12
        said = ids[:-1] if stopped else ids  # the characters 5 and 7 end the answer, and are no part of its text
        assert texts[number] == load_tokenizer(config).decode(said.tolist(), skip_special_tokens=True)
        ended += ids[-1] in (5, 7)
    assert ended > 3
    first = tokens[tokens.policy_versions.map(max) == 0]  # sampled by the model that is the reference
    assert_close(
        np.concatenate([*first.ref_logprobs]), np.concatenate([*first.behavior_logprobs]), rtol=0, atol=FLOAT32
    )
    assert all(row["mismatch_kl"] < 1e-6 for row in made.metrics if "mismatch_kl" in row)  # ratios are exact


def test_an_adapter_trains_from_its_merged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path / "cache"))
    found(tmp_path / "base")
    config = adapter(tmp_path / "adapter", tmp_path / "base", by=0.01)
    made = run(tmp_path / "run", f"model.path={config.path}", *HF)
    assert all(row["mismatch_kl"] < 1e-6 for row in made.metrics if "mismatch_kl" in row)
