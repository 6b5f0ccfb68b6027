"""The generation benchmark's two sides ask for the same: prompts, seeds and settings; a side that fails says so."""

from __future__ import annotations

import importlib
import shutil
import sys

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.vllm.core import sampling_arguments
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.run import prepare

generation = importlib.import_module("experiments.17_generation.bench")
TINY = ["model=tiny", "task=arithmetic", "task.heldout_size=8"]


def test_rounds_have_requests_of_their_own_in_whole_groups() -> None:
    config = load_config([*generation.SETTING, *TINY, "num_generations=4", "run_dir=unused"])
    rounds = generation.work_rounds(config, prepare(config), 10)
    first, second = next(rounds), next(rounds)
    assert [item.rollout_id for item in first + second] == list(range(20))
    assert len({item.seed for item in first + second}) == 20
    for items in (first, second):
        for start in (0, 4, 8):
            assert len({item.prompt.prompt_id for item in items[start : start + 4]}) == 1


def test_bare_vllm_is_asked_for_what_the_engine_asks_for() -> None:
    config = load_config([*generation.SETTING, *TINY, "run_dir=unused"])
    request = next(generation.work_rounds(config, prepare(config), 1))[0]
    ours = sampling_arguments(request)
    assert ours["max_tokens"] == 32 and ours["ignore_eos"] and ours["stop_token_ids"] == []
    whole = generation._bare_request(request, plain=False)
    assert whole == {"prompt_ids": request.prompt_ids.tolist(), "sampling": ours}
    plain = generation._bare_request(request, plain=True)["sampling"]
    assert plain == {name: value for name, value in ours.items() if name not in ("logprobs", "seed")}


def test_another_engine_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"generator\.engine=hf is not measured here; allowed: vllm"):
        generation.run([*TINY, "generator=hf"])


def test_bare_vllm_that_ends_is_a_failure_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    config = load_config([*generation.SETTING, *TINY])
    why = "Bare vLLM failed: it ended without a word"
    with pytest.raises(AsyncRLHFError, match=why), generation.bare_process(config):
        pass
