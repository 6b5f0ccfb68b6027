"""Configs composed from choices that were composed before: the same as Hydra's, in less time."""

from __future__ import annotations

import os

import pytest
from omegaconf import OmegaConf

from asyncrlhf.config import compose
from asyncrlhf.config.compose import compose_config, load_config
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.errors import ConfigError

CHANGES = [
    [],
    ["steps=3", "seed=7", "async.lag=3"],
    ["async=fill", "generator.slots=16", "async.max_staleness=2"],
    ["async={mode: sync}", "learner={ranks: 2}"],
    ["task.operations=['+','-']", "model.path='a b'", "eval_every=null"],
    ["algorithm=ppo", "generator.groups={a: {replicas: 1}}"],
    ["task.path=${oc.env:HOME}", "task.heldout_size=${batch_size}"],
    ["logging.wandb_kwargs={tags:[a,b]}", "learner.learning_rate=1e-4", "stall_timeout_seconds=5"],
    ["experiment=staleness_quick", "algorithm=grpo_mu", "async=fixed_lag", "async.lag=0", "seed=0"],
]
NONSENSE = ["steps=abc", "bogus=1", "generator.bogus=2", "algorithm=3", "reward.kind=[a]", "steps=3.5", "steps=1,2"]
NONSENSE += ["algorithm=nope", "generator=3", "steps=", "async.lag=-1", "steps={a: 1}"]


@pytest.mark.in_turn
@pytest.mark.parametrize("overrides", [*CHANGES, *([text] for text in NONSENSE)], ids=" ".join)
@pytest.mark.more_but(every=3)
def test_a_config_is_the_same_as_hydras(overrides: list[str]) -> None:
    compose_config([], None)  # so that Hydra has its schema
    results = []
    for made in (lambda: compose._composed(overrides, None), lambda: compose_config(overrides, None)):
        try:
            config = made()
            results.append((OmegaConf.to_yaml(config), repr(from_hydra(config))))
        except ConfigError as error:
            results.append((type(error).__name__, str(error)))
    assert results[0] == results[1]
    assert (results[0][0] == "ConfigError") == (" ".join(overrides) in NONSENSE)


@pytest.mark.parametrize("overrides", CHANGES, ids=" ".join)
def test_changes_of_values_need_no_composition(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compose_config(overrides, None)
    monkeypatch.setattr(compose, "_composed", lambda *_: pytest.fail("Hydra composed again"))
    assert compose_config(overrides, None) is not None


def test_no_change_reaches_the_next_config() -> None:
    before = repr(load_config([]))
    load_config(["task.operations=['-']", "generator.slots=3", "generator.groups={a: {replicas: 1}}"])
    compose_config([], None).task.operations.append("*")
    assert repr(load_config([])) == before


def test_the_environment_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setitem(os.environ, "ASYNCRLHF_TEST_PLACE", value)
        assert load_config(["task.path=${oc.env:ASYNCRLHF_TEST_PLACE}"]).task.path == value
