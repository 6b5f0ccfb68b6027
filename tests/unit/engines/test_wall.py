"""The hf engine's wall: which passes it chooses, what it refuses, and the faults that it sees."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.hf import own_cache, wall
from asyncrlhf.engines.hf.forward import SlotPasses
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.own_cache import Cohort, OwnCachePasses
from asyncrlhf.engines.hf.wall import Wall, find_passes
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import DEFAULT_CONTEXT, context_of
from tests.mixtures import mixture
from tests.unit.engines.families import FAMILIES, UNCACHED, family
from tests.unit.learner.worlds import llama


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Faults are planted here: no family's result may come from, or reach, another test."""
    wall._family_ways.cache_clear()
    yield
    wall._family_ways.cache_clear()


def chosen(model: PreTrainedModel) -> str:
    passes, _ = find_passes(model, slots=2)
    assert passes.capacity == 0
    if isinstance(passes, OwnCachePasses):
        return "own cache" if passes._caches else "no cache"
    return "packed"


# Those whose layers keep a state, or attend by code of their own: nothing can pass their rows packed.
OWN = ["mamba", "mamba2", "falcon_h1", "lfm2", "granitemoehybrid", "bamba", "qwen3_next", "jamba", "minimax", "bloom",
       "falcon", "mpt", "gptj", "codegen", "gpt_neo", "llama4_text"]  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*OWN, *UNCACHED])
@pytest.mark.more_but(every=4)
@pytest.mark.thorough_but(every=2)
def test_a_family_that_cannot_be_packed_gets_its_own_cache_or_none(name: str, dtype: torch.dtype) -> None:
    assert name in FAMILIES
    assert chosen(family(name, dtype=dtype)) == ("no cache" if name in UNCACHED else "own cache")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_family_that_can_be_packed_is(dtype: torch.dtype) -> None:
    assert chosen(llama().to(dtype)) == "packed"
    assert chosen(family("opt", dtype=dtype)) == "packed"


def test_a_slower_way_is_announced_with_its_reason() -> None:
    for name, sentence in (
        ("mpt", r"MptForCausalLM with transformers' own cache and .*slower.*attention interface"),
        ("lfm2", r"Lfm2ForCausalLM \(layers: conv, full_attention\).*1 of its 2 layers use transformers' attention"),
        ("recurrent_gemma", r"RecurrentGemmaForCausalLM.* with no cache and .*returns no cache"),
    ):
        assert re.search(sentence, find_passes(family(name), slots=2)[1])
    assert find_passes(llama(), slots=2)[1] == ""


def test_a_model_that_no_way_computes_alike_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("mpt")
    forward, calls = model.forward, iter(range(10**6))

    def drifting(input_ids: torch.Tensor, **given: Any) -> Any:
        output = forward(input_ids, **given)
        output.logits[..., 0] += 0.1 * next(calls)
        return output

    monkeypatch.setattr(model, "forward", drifting)
    with pytest.raises(
        ConfigError, match=r"^generator.engine=hf cannot run MptForCausalLM.*: .*log-probs is \d.*model\.$"
    ):
        find_passes(model, slots=2)


def test_a_model_whose_forward_pass_changes_its_weights_is_refused() -> None:
    """RWKV divides weights in its first pass in ``eval()``; those that a later load brings would stay as they are."""
    with pytest.raises(ConfigError, match="RwkvForCausalLM: its forward pass changes its own weights"):
        find_passes(family("rwkv", rescale_every=1), slots=2)


def test_routes_need_packed_passes() -> None:
    assert isinstance(find_passes(mixture(), slots=2, routes=True)[0], SlotPasses)
    with pytest.raises(
        ConfigError,
        match=r"can neither report experts nor evict tokens of JambaForCausalLM.*: only its packed passes can",
    ):
        find_passes(family("jamba"), slots=2, routes=True)


@pytest.mark.parametrize("name", ["lfm2", "llama"])
def test_nothing_of_the_comparison_stays(name: str) -> None:
    model = llama() if name == "llama" else family(name)
    own = model.config._attn_implementation
    before = {key: tensor.clone() for key, tensor in named_weights(model).items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    kind = chosen(model)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    assert all(torch.equal(before[key], tensor) for key, tensor in named_weights(model).items())
    assert kind == "packed" or model.config._attn_implementation == own
    # A tensor made in inference mode could not be written by a later load.
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_the_engine_takes_the_chosen_passes() -> None:
    engine = HFEngine(family("mamba"), slots=2)
    assert "own cache" in engine.note
    assert isinstance(engine._passes, OwnCachePasses)
    assert isinstance(HFEngine(llama(), slots=2)._passes, SlotPasses)


def test_the_context_is_the_models_own_limit() -> None:
    assert {name: context_of(family(name).config) for name in ("mpt", "gptj", "opt", "mistral")} == {
        "mpt": 128, "gptj": 128, "opt": 128, "mistral": 128,
    }  # fmt: skip
    assert [context_of(AutoConfig.for_model(name)) for name in ("mamba", "bloom")] == [DEFAULT_CONTEXT] * 2
    assert context_of(AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 77})) == 77


# Faults that are planted into passes which are right without them.


class Sharing(OwnCachePasses):
    """Siblings write into one cache."""

    def _cohorts(self, table: Any, rows: Any) -> Iterator[tuple[Cohort, list[int]]]:
        for cohort, members in super()._cohorts(table, rows):
            yield from ((cohort, [row]) for row in members)


class Forgetful(OwnCachePasses):
    """A row that moved goes on with the state of the row whose place it took."""

    def copy_rows(self, source: Any, target: Any, length: int) -> None:
        pass

    def _cohorts(self, table: Any, rows: Any) -> Iterator[tuple[Cohort, list[int]]]:
        for row, (cohort, place) in list(self._kept.items()):
            self._kept[row] = (Cohort(cohort.cache, int(table.length[row]) - 1, cohort.batch), place)
        return super()._cohorts(table, rows)


def keys_alone(cache: Any, rows: torch.Tensor, batch: int) -> Any:
    """transformers' own selection, which leaves the states of some layers as they are."""
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(rows)
    return selected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["falcon_h1", "mamba", "gptj"])
def test_planted_faults_are_seen(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(name, dtype=dtype)
    wall = Wall(model)
    seen = r"^decoding differs from .* log-probs is [\d.e+]+, allowed"
    assert wall.refusal(lambda: OwnCachePasses(model)) is None
    assert re.match(seen, str(wall.refusal(lambda: Forgetful(model))))
    with monkeypatch.context() as patched:
        patched.setattr(own_cache, "select_rows", lambda cache, rows, batch: cache)
        assert wall.refusal(lambda: Sharing(model)) is not None
    if name == "falcon_h1":
        monkeypatch.setattr(own_cache, "select_rows", keys_alone)
        assert wall.refusal(lambda: OwnCachePasses(model)) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "window"),
    [("mistral", "sliding_window"), ("llama4_text", "attention_chunk_size"), ("gpt_neo", "window_size")],
)
def test_an_ignored_window_is_seen(name: str, window: str, dtype: torch.dtype) -> None:
    model, blind = family(name, dtype=dtype), family(name, dtype=dtype, **{window: 128})
    blind.load_state_dict(model.state_dict(), strict=False)
    wall = Wall(model)
    assert wall.refusal(lambda: OwnCachePasses(model)) is None
    assert str(wall.refusal(lambda: OwnCachePasses(blind))).startswith("a whole pass differs")
