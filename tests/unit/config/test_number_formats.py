"""`auto` formats: bfloat16 only where the device computes it fast, and what runs is what the records say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.data import number_formats
from asyncrlhf.orchestrator.start import preflight

GPUS = ("generator.gpus=1", "learner.gpus=1")
AUTO = ("model.dtype=auto", "learner.mixed_precision=auto")


@pytest.fixture(params=[True, False], ids=["instructions", "none"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(number_formats, "cpu_has_bfloat16", lambda: request.param)
    monkeypatch.setattr(preflight, "cpu_has_bfloat16", lambda: request.param)
    return bool(request.param)


def formats(*overrides: str) -> tuple[str, str]:
    config = load_config(list(overrides))
    plain = to_plain(config)
    assert plain["model"]["dtype"] == config.model.dtype
    return config.model.dtype, plain["learner"]["mixed_precision"]


def test_auto_is_bfloat16_where_the_cpu_has_instructions_for_it(instructions: bool) -> None:
    expected = ("bfloat16", "bfloat16") if instructions else ("float32", "none")
    assert formats(*AUTO) == expected
    assert formats("experiment=smollm2_reasoning") == expected


def test_auto_is_bfloat16_on_gpus(instructions: bool) -> None:
    assert formats(*AUTO, *GPUS) == ("bfloat16", "bfloat16")


def test_one_group_of_generators_on_a_slow_cpu_decides_for_all(instructions: bool) -> None:
    groups = "generator.groups={fast:{gpus:1},slow:{gpus:0}}"
    assert formats(*AUTO, "learner.gpus=1", groups) == ("bfloat16" if instructions else "float32", "bfloat16")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), ""),
        (("model.dtype=bfloat16",), "model.dtype=bfloat16"),
        (("learner.mixed_precision=bfloat16",), "learner.mixed_precision=bfloat16"),
        (("model.dtype=bfloat16", "generator.engine=vllm", "generator.vllm.dtype=float32"), ""),
        (("generator.engine=vllm", "generator.vllm.dtype=bfloat16"), "generator.vllm.dtype=bfloat16"),
        (("model.dtype=bfloat16", "learner.mixed_precision=bfloat16", *GPUS), ""),
        (("model.dtype=bfloat16", "ray.address=10.0.0.1:6379"), ""),  # the machines of a cluster are not this one
        (AUTO, ""),
    ],
)
def test_a_slow_format_is_said_before_the_run(instructions: bool, overrides: tuple[str, ...], named: str) -> None:
    notes = preflight.slow_formats(load_config(list(overrides)))
    assert len(notes) == (bool(named) and not instructions), notes
    assert not notes or notes[0].startswith(named + ":")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "amx_tile": True, "amx_bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
    ],
)
def test_instructions_are_those_that_torch_finds(
    capabilities: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(torch.cpu.get_capabilities()) >= {"architecture"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert number_formats.cpu_has_bfloat16.__wrapped__() is expected
