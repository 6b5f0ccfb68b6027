"""What experiment 47 counts of the tokens that a gate sees, its control, and the page's figures."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch

from asyncrlhf.algorithms.gates import GATES, GateInputs, entropy_gate
from asyncrlhf.config.compose import load_config
from experiments import study

entropy = import_module("experiments.47_entropy_gate.gate")

SEEN = GateInputs(
    policy_logprobs=torch.tensor([-1.0, -1.0, -1.0, float("nan")]),
    behavior_logprobs=torch.tensor([-1.2, -1.5, -0.5, float("nan")]),
    entropy=torch.tensor([0.0, 0.005, 2.0, float("nan")]),
    advantages=torch.ones(4),
    loss_mask=torch.tensor([True, True, True, False]),
    sequence_ids=torch.zeros(4).long(),
)


def test_tokens_are_counted_by_their_entropy_and_the_gate_is_the_same() -> None:
    with entropy.watched(flat=False) as found:
        keep = GATES["entropy"](SEEN, 1.0)
        assert torch.equal(keep, entropy_gate(SEEN, 1.0))
        GATES["entropy"](SEEN, 1.0)
    assert GATES["entropy"] is entropy_gate
    assert found.sums[:, 0].tolist() == [2, 2, 0, 0, 0, 0, 2], "tokens"
    np.testing.assert_allclose(found.sums[[0, 1, 6], 2], [0.08, 0.5, 0.5], rtol=1e-6)
    assert found.sums[:, 3].tolist() == [2, 2, 0, 0, 0, 0, 0], "dropped"


def test_the_control_has_one_bound_for_all() -> None:
    """Of the mean entropy, 0.668 nats: |log r| up to 0.82 stays, whatever the token's own."""
    with entropy.watched(flat=True):
        assert GATES["entropy"](SEEN, 1.0)[:3].all()
        assert GATES["entropy"](SEEN, 0.1)[:3].tolist() == [True, False, False]


def test_arms_are_of_one_rate_and_differ_in_the_bound_alone() -> None:
    arms = entropy.arms()
    assert len(arms) == len(set(arms)) == 30
    for arm in arms[:10]:
        config = load_config(list(arm.overrides()))
        assert config.algorithm.gate == "entropy" and config.learner.learning_rate == 5e-5
        assert config.algorithm.off_policy_mask_threshold == arm.threshold


def test_a_run_that_fails_is_a_row_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "run_cell", lambda cell, samples: ({"status": "failed: no"}, []))
    assert entropy.run(entropy.arms()[0]) == [{"status": "failed: no"}]


def test_the_page_has_the_figures_of_the_committed_rows() -> None:
    runs, tokens = (pd.read_csv(entropy.HERE / name) for name in ("runs.csv", "tokens.csv"))
    assert entropy.tables(runs[runs.status == "done"], tokens) in (entropy.HERE / "README.md").read_text()
