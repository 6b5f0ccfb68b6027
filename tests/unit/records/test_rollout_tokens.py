"""What ranks record of single tokens: the loss's own facts, the same choice for any number of ranks, whole texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step import loss as loss_module
from asyncrlhf.learner.step.plan import ResponseTokens, StepPlan
from asyncrlhf.learner.step.token_facts import token_facts
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.records.write.rollout_tokens import Pieces, sampled
from asyncrlhf.types import TrainBatch
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import backend, random_batch, share

DECOUPLED = AlgorithmConfig(correction="truncate", correction_high=1.2, anchor="prox", num_iterations=2, minibatches=2)
LEARNING = LearnerConfig(learning_rate=1e-3, token_budget=40)


def recorded(trained: TorchBackend, batch: TrainBatch, ids: Any = None) -> dict[int, dict[str, Any]]:
    """The rows of one step by rollout id."""
    rows: list[dict[str, Any]] = []
    wanted = batch.rollout_ids.tolist() if ids is None else ids
    trained.observe = lambda plan: rows.extend(token_facts(plan, trained.algorithm, wanted))
    trained.train_step(batch)
    return {row["rollout_id"]: row for row in rows}


def test_the_weights_are_those_that_the_loss_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted inside of the loss, microbatch by microbatch, in the step's last pass."""
    used: dict[int, dict[str, np.ndarray]] = {}  # by the place of a microbatch in the rank's tokens
    plans: list[StepPlan] = []
    original = loss_module.correction_weight

    def note(config: AlgorithmConfig, tokens: ResponseTokens) -> Any:
        given = original(config, tokens)
        assert tokens.proximal_logprobs is not None
        facts = {
            "importance_weight": (tokens.proximal_logprobs - tokens.behavior_logprobs).exp(),
            "behavior_weight": given[0],
            "policy_logprobs": tokens.policy_logprobs.detach().clone(),
            "behavior_logprobs": tokens.behavior_logprobs,
        }
        used[tokens.behavior_logprobs.storage_offset()] = {name: x.numpy().copy() for name, x in facts.items()}
        return given

    monkeypatch.setattr(loss_module, "correction_weight", note)
    trained, batch = backend(DECOUPLED, LEARNING), random_batch(6, 3, seed=3)
    observe: list[Any] = []
    trained.observe = lambda plan: (plans.append(plan), observe.extend(token_facts(plan, DECOUPLED, batch.rollout_ids)))
    trained.train_step(batch)
    assert len(used) > 2 and len(observe) == 18
    ids = plans[0].tokens.sequence_ids.numpy()
    places = {int(rollout): np.flatnonzero(ids == i) for i, rollout in enumerate(plans[0].batch.rollout_ids)}
    of_loss = {name: np.concatenate([used[start][name] for start in sorted(used)]) for name in used[0]}
    for row in observe:
        for name, whole in of_loss.items():
            assert_close(row[name], whole[places[row["rollout_id"]]], atol=FLOAT32)
        given = np.flatnonzero(batch.rollout_ids == row["rollout_id"])[0]
        here = slice(batch.cu_seqlens[given], batch.cu_seqlens[given + 1])
        answer = batch.response_mask[here]
        assert row["response_ids"].tolist() == batch.token_ids[here][answer].tolist()
        assert row["policy_versions"].tolist() == batch.policy_versions[here][answer].tolist()
        assert_close(row["behavior_logprobs"], batch.behavior_logprobs[here][answer])
    assert any((row["behavior_weight"] < row["importance_weight"] - 0.1).any() for row in observe), "nothing was cut"
    assert any(np.abs(row["policy_logprobs"] - row["proximal_logprobs"]).max() > 1e-4 for row in observe)


def test_the_sample_and_its_rows_are_the_same_with_one_rank_and_with_two() -> None:
    batch = random_batch(6, 3, seed=5)
    ids = sampled(batch.rollout_ids.tolist(), 7, seed=11)
    assert len(ids) == 7 and ids == sampled(batch.rollout_ids.tolist()[::-1], 7, seed=11)
    assert ids != sampled(batch.rollout_ids.tolist(), 7, seed=12)
    whole = recorded(backend(AlgorithmConfig()), batch, ids)
    halves = [recorded(backend(AlgorithmConfig()), share(batch, rank, 2), ids) for rank in range(2)]
    assert all(halves) and sorted(whole) == sorted([*halves[0], *halves[1]]) == ids
    for i, row in (halves[0] | halves[1]).items():
        for name in ("policy_logprobs", "importance_weight", "behavior_weight", "response_ids", "loss_mask"):
            assert_close(np.asarray(row[name], np.float32), np.asarray(whole[i][name], np.float32), atol=FLOAT32)


def test_samples_are_spread_over_a_batch_whatever_its_ids() -> None:
    """No place in a group and no part of the batch is preferred."""
    counts = np.zeros(64)
    for step in range(400):
        ids = list(range(step * 64, step * 64 + 64))
        counts[np.array(sampled(ids, 16, seed=0)) - step * 64] += 1
    assert counts.sum() == 400 * 16 and counts.min() > 70 and counts.max() < 130
    assert sampled([5, 3], 16, seed=0) == [3, 5] and sampled([5, 3], 0, seed=0) == []


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet | {"<eos>": 256}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def metaspace() -> PreTrainedTokenizerFast:
    """Whose decoder takes the space in front of a text's first word away."""
    made = Tokenizer(models.WordLevel({"▁0": 0, "▁two": 1, "▁words": 2, "0": 3, "▁": 4}, unk_token="▁"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_the_pieces_of_a_text_joined_are_the_text() -> None:
    tokenizer = byte_level()
    text = "né 🙂</script>"
    ids = [*tokenizer.encode(text), 256]
    pieces = Pieces(tokenizer)(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids) == 18
    assert pieces[1:3] == ["é", ""] and pieces[-1] == ""
    torn = Pieces(tokenizer)(tokenizer.encode("a🙂")[:-1])
    assert len(torn) == 4 and torn[0] == "a", "an answer may be cut within a character"
    assert Pieces(metaspace())([1, 2]) == ["two", " words"]


def test_the_tokens_out_of_the_loss_are_marked() -> None:
    batch = random_batch(2, 3, seed=1)
    batch.loss_mask[np.flatnonzero(batch.response_mask)[::3]] = False
    rows = recorded(backend(AlgorithmConfig(correction="none")), batch)
    assert all(row["behavior_weight"] is None and row["ref_logprobs"] is None for row in rows.values())
    assert sum(int((~row["loss_mask"]).sum()) for row in rows.values()) == int(
        (batch.response_mask & ~batch.loss_mask).sum()
    )
