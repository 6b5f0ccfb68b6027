"""Steps of several passes over the batch: what is of the present policy, and what is a mean over the passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.plan import Microbatch, StepPlan
from tests.numeric import assert_close
from tests.unit.learner.test_presets import LONGEST, preset, stale_batch
from tests.unit.learner.worlds import backend, llama, plain_logprobs


def test_the_clipped_share_is_a_mean_over_the_passes() -> None:
    """The policy stands still, so that each pass clips the same tokens."""
    found = []
    for passes in (1, 3):
        algorithm = dataclasses.replace(preset("grpo_mu"), num_iterations=passes, minibatches=1)
        still = backend(algorithm, LearnerConfig(learning_rate=0.0), max_completion_length=LONGEST)
        found.append(still.train_step(stale_batch()).metrics["clip_fraction"])
    assert found[0] > 0.1
    assert_close(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["m2po", "sat", "online_dpo"])
@pytest.mark.parametrize("budget", [30, 10_000], ids=["several microbatches", "one"])
def test_the_targets_of_a_later_pass_are_of_the_policy_that_the_first_has_moved(
    name: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = dataclasses.replace(preset(name), num_iterations=2, minibatches=1)
    rate = LearnerConfig(learning_rate=1e-2, max_grad_norm=0.0, token_budget=budget)
    reference = llama(seed=5) if algorithm.needs_reference else None
    moving = backend(algorithm, rate, reference=reference, max_completion_length=LONGEST)
    filled, fill = [], moving._fill

    def watched(plan: StepPlan, minibatch: Sequence[Microbatch]) -> None:
        present = llama()
        present.load_state_dict(dict(moving.parameters()), strict=False)
        with torch.no_grad():
            now = torch.cat(plain_logprobs(present, plan.batch))
        known = torch.cat([plan.tokens.part([part]).policy_logprobs for part in minibatch])
        filled.append((known.detach().sort().values, now.sort().values))
        fill(plan, minibatch)

    monkeypatch.setattr(moving, "_fill", watched)
    moving.train_step(stale_batch())
    (known, now), (known_later, later) = filled
    assert_close(known, now, atol=1e-4)
    assert_close(known_later, later, atol=1e-4)
    assert (later - now).abs().max() > 0.05
