"""Settings that a run does not read are said at its start, and none of what we ship is among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.unused import unused_settings
from asyncrlhf.errors import ConfigError

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).resolve().parents[3] / "conf/experiment").glob("*.yaml"))


@pytest.mark.parametrize(
    ("overrides", "names", "needed"),
    [
        ("generator.vllm.tensor_parallel_size=2", "generator.vllm.tensor_parallel_size", "generator.engine=vllm"),
        ("generator.fake.latency_median=3", "generator.fake.latency_median", "generator.engine=fake"),
        ("reward.target=mine:score", "reward.target", "reward.kind=python"),
        (
            "reward.model.path=x reward.model.max_length=9",
            "reward.model.path, reward.model.max_length",
            "reward.kind=model",
        ),
        ("async.ess_floor=0.3", "async.ess_floor", "async.adaptive=true"),
        ("task.path=mine.jsonl", "task.path", "task=prompts"),
    ],
)
def test_what_is_not_read_is_named_with_what_it_needs(overrides: str, names: str, needed: str) -> None:
    assert unused_settings(load_config(overrides.split())) == [f"Not used: {names}; needs {needed}."]


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "generator.engine=fake generator.fake.latency_median=3",
        "generator.groups={fast:{engine:fake,replicas:1},slow:{replicas:1}} generator.fake.latency_median=3",
        "reward.kind=python reward.target=mine:score",
        "reward.kind=model reward.model.path=y",
        "async.adaptive=true async.ess_floor=0.3",
    ],
)
def test_what_is_read_is_not_named(overrides: str) -> None:
    assert unused_settings(load_config(overrides.split())) == []


def test_no_secret_is_said() -> None:
    said = unused_settings(load_config(["reward.http.url=http://me:hunter2@there"]))
    assert said == ["Not used: reward.http.url; needs reward.kind=http."]


@pytest.mark.more
def test_no_experiment_sets_what_it_does_not_use() -> None:
    composed = 0
    for name in EXPERIMENTS:
        try:
            config = load_config([f"experiment={name}"])
        except ConfigError:  # needs a file of the user's, or is a sweep
            continue
        assert unused_settings(config) == [], name
        composed += 1
    assert composed >= 5
