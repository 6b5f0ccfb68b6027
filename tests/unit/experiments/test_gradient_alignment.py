"""The cosine of consecutive gradients, what a projection leaves of them, and the page's figures."""

from __future__ import annotations

from importlib import import_module

import pandas as pd
import pytest
import torch
from torch import nn

from asyncrlhf.config.compose import load_config

alignment = import_module("experiments.46_gradient_alignment.align")


def seen(gradients: list[list[float]], project: bool) -> tuple[list[float], list[torch.Tensor]]:
    """(cosines, what the optimizer gets) of one module whose weights have two tensors."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 2))])
    found, left = alignment.Alignment(project), []
    for gradient in gradients:
        module[0].grad, module[1].grad = torch.tensor(gradient[:1]), torch.tensor([gradient[1:]])
        found.see(module)
        left.append(torch.cat([module[0].grad, module[1].grad[0]]))
    return found.cosines, left


GRADIENTS = [[1.0, 0.0, 0.0], [3.0, 0.0, 4.0], [-3.0, 0.0, 4.0], [0.0, 2.0, 0.0]]


def test_cosines_are_of_the_gradients_that_batches_gave_also_where_they_are_changed() -> None:
    expected = pytest.approx([0.6, (16 - 9) / 25, 0.0])
    for project in (False, True):
        cosines, _ = seen(GRADIENTS, project)
        assert cosines == expected


def test_a_projected_gradient_has_nothing_along_the_one_before_and_keeps_what_is_against_it() -> None:
    _, plain = seen(GRADIENTS, False)
    _, left = seen([*GRADIENTS, [1.0, -1.0, 0.0]], True)
    assert torch.equal(left[0], plain[0])
    for before, now in zip(plain[:2], left[1:3], strict=True):
        assert float(before @ now) == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(left[3], plain[3]) and left[4].tolist() == [1.0, -1.0, 0.0]


def test_every_arm_has_allowed_settings_and_updates_of_one_batch_in_pairs() -> None:
    arms = alignment.arms()
    assert len(arms) == len(set(arms)) == 75
    rates = set()
    for arm in {(arm.method, arm.lag): arm for arm in arms}.values():
        config = load_config(list(arm.overrides()))
        assert config.algorithm.minibatches == 2 and config.algorithm.num_iterations == 1
        rates.add((arm.method, config.learner.learning_rate))
    assert rates == {("default", 1e-4), ("no_weights", 1e-4), ("rate_quarter", 2.5e-5)}


def test_the_page_has_the_figures_of_the_committed_rows() -> None:
    runs = pd.read_csv(alignment.HERE / "runs.csv")
    assert alignment.tables(runs[runs.status == "done"]) in (alignment.HERE / "README.md").read_text()
