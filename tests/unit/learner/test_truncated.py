"""Truncated sampling through the whole learner: every preset at equal weights, gradients, splits, references."""

from __future__ import annotations

import dataclasses
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.data.packing import minibatch_indices, pack, select
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.records.write.checkpoint import CheckpointWriter, read_checkpoint
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.records.write.saved_rollouts import write_rollouts
from asyncrlhf.types import Rollout, SamplingParams, TrainBatch
from tests.truncated import TRUNCATED, hf_rollouts, renormalised, scored, sets_of
from tests.unit.learner.test_presets import PRESETS, preset
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, share

VOCABULARY = 97
TEMPERATURE = TRUNCATED.temperature
MODEL = {"vocab_size": VOCABULARY, "initializer_range": 0.2}


@cache
def rollouts() -> tuple[Rollout, ...]:
    return tuple(hf_rollouts(llama(**MODEL)))


@cache
def batch() -> TrainBatch:
    return pack(scored(rollouts()))


def without_sets(given: TrainBatch) -> TrainBatch:
    return dataclasses.replace(given, kept_ids=None, kept_counts=None)


def step(name: str, given: TrainBatch, budget: int = 10_000, reference: int = 0) -> tuple[Any, dict[str, float]]:
    """Of a learner at the sampler's weights, which do not move."""
    algorithm = preset(name)
    trained = backend(
        algorithm,
        LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, token_budget=budget),
        model=llama(**MODEL),
        reference=llama(seed=reference, **MODEL) if algorithm.needs_reference else None,
        temperature=TEMPERATURE,
        max_completion_length=TRUNCATED.max_completion_length,
    )
    metrics = trained.train_step(given).metrics
    return gradients(trained), metrics


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_ratios_are_1_at_equal_weights(name: str) -> None:
    """Within 1e-5, what two float32 forward passes of different order leave of a log-prob."""
    metrics = step(name, batch())[1]
    assert metrics["behavior_log_ratio_abs_max"] < 1e-5
    assert metrics["ess_fraction"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ess_fraction_seq"] == pytest.approx(1.0, abs=1e-6)
    # r - 1 - log r in float32 is off by up to 6e-8 a token at r = 1; without the sets it is over 1e-3.
    assert abs(metrics["behavior_kl"]) < 1e-7
    assert metrics["policy_log_ratio_abs_max"] < 1e-5 and abs(metrics.get("ref_kl", 0.0)) < 1e-7
    assert metrics["clip_fraction"] == 0.0 or preset(name).coef == "signed", "TOPR's bound is at 1 itself"
    for cut in ("behavior_truncated_fraction", "behavior_masked_fraction"):
        assert metrics.get(cut, 0.0) == 0.0
    assert 0.3 < metrics["truncation_mass"] < 0.9


@pytest.mark.more_but(every=6)
def test_without_the_sets_they_are_not() -> None:
    """The fault itself, so that the test above can fail."""
    metrics = step("decoupled_grpo", without_sets(batch()))[1]
    assert metrics["behavior_log_ratio_abs_max"] > 0.05 and metrics["behavior_kl"] > 1e-3
    assert "truncation_mass" not in metrics


def test_the_metrics_are_those_of_the_reference() -> None:
    """``truncation_mass`` and the entropy, by a plain forward pass and a loop over the sets."""
    model, masses, entropies = llama(**MODEL), [], []
    for rollout in rollouts():
        logits = response_logits(model, rollout)
        pi = (logits / TEMPERATURE).softmax(-1)
        sets = sets_of(rollout)
        masses += [float(row[sorted(kept)].sum()) for row, kept in zip(pi, sets, strict=True)]
        on_sets = renormalised(logits, sets, TEMPERATURE)
        entropies += [-float((row.exp() * row)[row > -torch.inf].sum()) for row in on_sets]
    metrics = step("grpo", batch())[1]
    assert metrics["truncation_mass"] == pytest.approx(np.mean(masses), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)


def test_what_a_policy_says_of_tokens_is_of_the_renormalised_distribution() -> None:
    """The collision probability that ``opob`` weighs sequences by, too."""
    facts = PackedPolicy(llama(**MODEL), collision=True)(PackedInputs.of_batch(batch()), TEMPERATURE)
    on_sets = torch.cat([renormalised(response_logits(llama(**MODEL), r), sets_of(r), TEMPERATURE) for r in rollouts()])
    chosen = torch.from_numpy(np.concatenate([r.response_ids for r in rollouts()]))
    expected = (on_sets.gather(1, chosen[:, None])[:, 0], on_sets.exp().square().sum(-1))
    for ours, theirs in zip((facts.logprobs, facts.collision), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def response_logits(model: Any, rollout: Rollout) -> torch.Tensor:
    """[L, V] in float64 of a plain forward pass over the whole text."""
    text = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))
    logits: torch.Tensor = model(text[None]).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    return logits.double()


def plain_gradient(rollouts: tuple[Rollout, ...], advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """Of -sum A log pi_S a sequence, mean over sequences, by autograd of masked logits."""
    model = llama(**MODEL)
    total = torch.zeros(())
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        text = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))
        logits = model(text[None]).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        logprobs = renormalised(logits, sets_of(rollout), TEMPERATURE)
        chosen = logprobs.gather(1, torch.from_numpy(rollout.response_ids)[:, None])
        total = total - float(advantage) * chosen.sum() / len(rollouts)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_the_gradient_is_that_of_the_renormalised_policy() -> None:
    """REINFORCE, whose coefficient is the raw reward: the whole distribution's gradient is another one."""
    expected = plain_gradient(rollouts(), batch().rewards)
    assert_same(step("reinforce", batch())[0], expected, tolerance=2e-5)
    with pytest.raises(AssertionError):
        assert_same(step("reinforce", without_sets(batch()))[0], expected, tolerance=0.02)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["decoupled_grpo", "vcpo", "ppo", "online_dpo", "impact", "m2po"])
@pytest.mark.more_but(every=3)
def test_microbatches_and_chunks_of_the_head_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, metrics = step(name, batch(), reference=5)
    for budget, logits in ((40, 2**27), (1, 2**27), (10_000, 7 * VOCABULARY)):
        monkeypatch.setattr(forward, "MAX_LOGITS", logits)
        other, others = step(name, batch(), budget, reference=5)
        assert_same(other, gradient, tolerance=3e-5)
        assert others == pytest.approx(metrics, rel=1e-3, abs=1e-4)


def test_a_head_that_is_not_plain_knows_the_sets() -> None:
    plain = PackedPolicy(llama(**MODEL))
    whole = PackedPolicy(llama(**MODEL))
    whole._plain_head = False
    inputs = PackedInputs.of_batch(batch())
    for ours, theirs in zip(whole(inputs, TEMPERATURE), plain(inputs, TEMPERATURE), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_stretch_of_the_inputs_takes_its_own_sets() -> None:
    """As the ranks of sequence parallelism cut them: each predicts what its own positions predict."""
    inputs = PackedInputs.of_batch(batch())
    facts = PackedPolicy(llama(**MODEL))
    whole = facts(inputs, TEMPERATURE)
    hidden = facts._trunk(inputs).index_select(0, inputs.rows)
    assert inputs.kept is not None
    for own in (torch.arange(0, len(inputs.rows), 2), torch.arange(5, 31), torch.arange(0)):
        part = facts.of_hidden(hidden[own], inputs.targets[own], TEMPERATURE, inputs.kept.at(own))
        torch.testing.assert_close(part.logprobs, whole.logprobs[own], rtol=0, atol=1e-6)
        torch.testing.assert_close(part.kept_mass, whole.kept_mass[own], rtol=0, atol=1e-6)


def test_a_reference_worker_renormalises_on_the_same_sets() -> None:
    """The sampler's own weights as reference: its log-probs are mu. What the learner makes of both is the same."""
    policy = ReferencePolicy(llama(**MODEL), temperature=TEMPERATURE, precision="none", token_budget=60)
    answers = policy.answer(rollouts())
    for rollout, answer in zip(rollouts(), answers, strict=True):
        np.testing.assert_allclose(answer, rollout.behavior_logprobs, atol=1e-5)  # type: ignore[arg-type]
    other = ReferencePolicy(llama(seed=5, **MODEL), temperature=TEMPERATURE, precision="none", token_budget=60)
    answers = other.answer(rollouts())
    served = pack(scored([dataclasses.replace(r, ref_logprobs=a) for r, a in zip(rollouts(), answers, strict=True)]))  # type: ignore[arg-type]
    own = step("tba", batch(), reference=5)[0]
    trained = backend(preset("tba"), model=llama(**MODEL), temperature=TEMPERATURE, reference_served=True)
    trained.train_step(served)
    assert_same(gradients(trained), own, tolerance=2e-5)


def test_score_for_the_audit_is_of_the_whole_distribution() -> None:
    text = np.arange(9)
    trained = backend(model=llama(**MODEL), temperature=TEMPERATURE)
    own = llama(**MODEL)(torch.from_numpy(text)[None]).logits[0, :-1].log_softmax(-1)
    expected = own.gather(1, torch.from_numpy(text)[1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(trained.score([text])[0], expected, atol=1e-5)


# --- the sets on their way ---------------------------------------------------------------------------------------


def mixed() -> list[Rollout]:
    """Truncated and not, as replicas of two kinds would give them."""
    plain = hf_rollouts(llama(**MODEL), SamplingParams(5), groups=2, size=2, seed=3)
    plain = [dataclasses.replace(r, rollout_id=100 + r.rollout_id, group_id=10 + r.group_id) for r in plain]
    return [*rollouts()[:5], *plain, *rollouts()[5:]]


def same(a: Rollout, b: Rollout) -> bool:
    names = ("response_ids", "behavior_logprobs", "kept_ids", "kept_counts")
    arrays = [(getattr(a, name), getattr(b, name)) for name in names]
    return all((x is None) == (y is None) and (x is None or np.array_equal(x, y)) for x, y in arrays)


def test_a_bundle_brings_them_whole() -> None:
    for given in (mixed(), list(rollouts()), mixed()[5:9], mixed()[4:6]):
        back = list(pickle.loads(pickle.dumps(RolloutBundle(given))))
        assert len(back) == len(given) and all(same(a, b) for a, b in zip(given, back, strict=True))
    flat = len(pickle.dumps(RolloutBundle(rollouts())))
    ids = sum(len(r.kept_ids) for r in rollouts() if r.kept_ids is not None)
    plain = [dataclasses.replace(r, kept_ids=None, kept_counts=None) for r in rollouts()]
    counts = sum(len(r.response_ids) for r in rollouts())
    assert flat - len(pickle.dumps(RolloutBundle(plain))) < 4 * (ids + counts) + 500, "4 bytes an id and a token"


def listed(given: TrainBatch) -> dict[int, list[list[int]]]:
    """The kept ids of every token, sequence by sequence."""
    assert given.kept_ids is not None and given.kept_counts is not None
    parts = np.split(given.kept_ids, np.cumsum(given.kept_counts)[:-1])
    assert sum(map(len, parts)) == len(given.kept_ids)
    return {
        int(rollout): [part.tolist() for part in parts[start:stop]]
        for rollout, start, stop in zip(given.rollout_ids, given.cu_seqlens[:-1], given.cu_seqlens[1:], strict=True)
    }


def test_packing_and_every_cut_keep_each_tokens_set() -> None:
    made = pack(scored(mixed()))
    expected = {}
    for r in mixed():
        none: list[set[int]] = [set()] * len(r.response_ids)
        expected[r.rollout_id] = [
            set(),
            *[set()] * (len(r.prompt.token_ids) - 1),
            *(sets_of(r) if r.kept_ids is not None else none),
        ]
    cuts = [made, select(made, [3, 17, 6]), select(made, []), *(share(made, rank, 3) for rank in range(3))]
    cuts += [select(made, part) for part in minibatch_indices(made, 2)]
    for cut in cuts:
        found = listed(cut) if cut.num_sequences else {}
        for rollout, sets in found.items():
            assert [set(ids) for ids in sets] == expected[rollout]
        assert cut.kept_counts is not None and len(cut.kept_counts) == cut.num_tokens
    assert pack(scored(mixed()[5:9])).kept_ids is None


def test_tokens_of_both_kinds_in_one_batch_have_ratio_1() -> None:
    """Each against its own sampler, which both had the temperature of the learner."""
    plain = hf_rollouts(llama(**MODEL), SamplingParams(6, temperature=TEMPERATURE), groups=2, seed=3)
    plain = [dataclasses.replace(r, rollout_id=100 + r.rollout_id, group_id=10 + r.group_id) for r in plain]
    metrics = step("decoupled_grpo", pack(scored([*rollouts(), *plain])))[1]
    assert metrics["behavior_log_ratio_abs_max"] < 1e-5


def test_a_checkpoint_brings_them_back(tmp_path: Any) -> None:
    writer = CheckpointWriter(tmp_path, 3, keep=1)
    given = {r.rollout_id: r for r in mixed()}
    write_rollouts(writer.rollouts, list(given.values()))
    folder = writer.commit({"version": 3}, RecordMarker())
    back = read_checkpoint(folder).rollouts
    assert back.keys() == given.keys() and all(same(back[i], given[i]) for i in given)


def test_sets_that_do_not_fit_their_response_are_refused() -> None:
    first = rollouts()[0]
    assert first.kept_ids is not None and first.kept_counts is not None
    for wrong in (
        {"kept_ids": first.kept_ids[:-1]},
        {"kept_ids": None},
        {"kept_counts": first.kept_counts[:-1]},
        {"kept_counts": None},
    ):
        with pytest.raises(ValueError, match=f"rollout {first.rollout_id}: "):
            dataclasses.replace(first, **wrong)
