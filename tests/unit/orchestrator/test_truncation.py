"""What a run makes of truncated sampling: which engines train under it, and who reads whole rollouts then."""

from __future__ import annotations

import pytest

from asyncrlhf.cluster.parts import reference_spec
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.run import prepare, train
from asyncrlhf.orchestrator.start.preflight import check_truncation
from asyncrlhf.readahead.outlook import reference_note

GROUPS = "generator.groups={a: {engine: hf}, b: {engine: vllm}}"


@pytest.mark.parametrize("engine", ["generator.engine=vllm", GROUPS])
@pytest.mark.parametrize("filters", ["generator.top_p=0.9", "generator.min_p=0.1", "generator.top_k=129"])
def test_training_on_what_vllm_cannot_tell_is_refused(engine: str, filters: str) -> None:
    config = load_config([engine, filters])
    with pytest.raises(ConfigError, match=r"allowed: top_p=1 min_p=0 top_k<=128, or generator\.engine=hf\."):
        train(config)


@pytest.mark.parametrize(
    "settings",
    [
        ["generator.engine=vllm", "generator.top_k=128"],
        ["generator.engine=vllm", "generator.temperature=0.7"],
        ["generator.engine=hf", "generator.top_p=0.9", "generator.top_k=20", "generator.min_p=0.1"],
    ],
)
def test_what_an_engine_can_tell_is_not(settings: list[str]) -> None:
    check_truncation(load_config(settings).generator)


def test_min_p_reaches_the_requests() -> None:
    sampling = prepare(load_config(["runtime=local", "generator.min_p=0.1", "generator.top_p=0.8"])).sampling
    assert (sampling.min_p, sampling.top_p, sampling.top_k) == (0.1, 0.8, 0)


@pytest.mark.parametrize("filters", ["generator.top_p=0.9", "generator.min_p=0.1", "generator.top_k=20"])
def test_the_reference_reads_whole_rollouts(filters: str) -> None:
    served = [
        "runtime=local",
        "algorithm=tba",
        "reference=service",
        "fusion=chunk",
        "num_generations=4",
        "batch_size=8",
    ]
    plain, truncated = load_config(served), load_config([*served, filters])
    assert plain.reference_reads_ahead and reference_note(plain) is None
    assert not truncated.reference_reads_ahead
    spec, note = reference_spec(truncated), reference_note(truncated)
    assert spec is not None and spec.cache_tokens == 0
    assert note is not None and "reads whole rollouts" in note and note in prepare(truncated).notes
