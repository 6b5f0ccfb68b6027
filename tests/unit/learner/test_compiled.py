"""``learner.compile``: the same steps, and one graph for all layers and any number of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.model_pass import compile_layers
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.numeric import assert_close
from tests.unit.learner.worlds import backend, llama, random_batch


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["none", "bfloat16"])
def test_compiled_steps_are_those_of_the_plain_learner(precision: str) -> None:
    """Three updates, of which what is compiled sees the weights; of different sizes, for which nothing is compiled
    again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    curves = []
    for compiled in (False, True):
        config = LearnerConfig(learning_rate=1e-3, mixed_precision=precision, compile=compiled)
        trained = backend(learner=config, model=llama(num_hidden_layers=4))
        curves.append([trained.train_step(random_batch(groups, seed=groups)).metrics for groups in (4, 6, 3)])
    within = 1e-4 if precision == "none" else 0.15
    for plain, found in zip(*curves, strict=True):
        assert_close(found["grad_norm"], plain["grad_norm"], rtol=within)
        assert_close(found["entropy"], plain["entropy"], rtol=within)
    plain = backend(learner=replace(config, compile=False), model=llama(num_hidden_layers=4))
    plain.model.load_state_dict(trained.model.state_dict())
    text = [np.arange(1, 14)]
    assert_close(trained.score(text)[0], plain.score(text)[0], atol=1e-4 if precision == "none" else 0.2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6  # a layer with and without gradient, the logits'


@pytest.mark.thorough
def test_a_compiled_layer_saves_no_product_of_its_gates_and_no_norm() -> None:
    """Between the passes, of numbers per token: the gate and its factor (each as wide as the MLP), and of the hidden
    width one in front of each norm, queries and the attention's output."""
    torch._dynamo.reset()
    config = LearnerConfig(learning_rate=1e-3, compile=True, mixed_precision="bfloat16")
    model = llama(num_hidden_layers=2, hidden_size=64, intermediate_size=192)
    learner = backend(learner=config, model=model)
    given = random_batch(6)
    learner.train_step(given)  # compiles
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner.train_step(given)
    tokens = {t.shape[0] for t in saved.values() if t.shape[1:] == (192,) and t.dtype == torch.bfloat16}
    (count,) = tokens - {64, 192}
    widths = [t.numel() / count for t in saved.values() if t.dtype == torch.bfloat16 and t.numel() % count == 0]
    assert widths.count(192) == 2 * 2, "gate and factor of each of two layers, not their product"
    assert widths.count(64) <= 4 * 2 + 1, "of the norms' outputs only the last one, which the head takes"


def test_a_model_that_does_not_name_its_layers_is_refused() -> None:
    model = llama()
    model._no_split_modules = None
    with pytest.raises(ConfigError, match=r"learner.compile=true: transformers does not say which modules"):
        compile_layers(model)
