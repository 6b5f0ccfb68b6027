"""What a step of the hf engine asks of a GPU, counted on a pretended one: waits, copies, launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrlhf.engines.hf import forward, hf_engine
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.layer_shapes import LayerShape
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.pretended_gpu import CARD, Counts, PretendedGpu, pretended_gpu

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
CLASSES: dict[str, tuple[type, type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Launches of a decode step: beside the layers, and of one layer. A tenth more fails.
LAUNCHES = {("llama", torch.float32): (31, 18), ("llama", torch.bfloat16): (31, 20), ("qwen3", torch.bfloat16): (48, 58)}
MIXED = ({}, {"top_k": 20}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.1})


@contextmanager
def card_engine(
    slots: int, *, layers: int = 2, dtype: torch.dtype = torch.bfloat16, family: str = "llama"
) -> Iterator[tuple[HFEngine, PretendedGpu]]:
    """An engine on the pretended GPU, whose values cannot pass the comparison at an engine's start. Tensors of another
    class than torch's own do not exist in inference mode."""
    config, kind = CLASSES[family]
    with torch.device("meta"):
        model = kind(config(num_hidden_layers=layers, **SHAPE)).to(dtype)
    shapes = {i: LayerShape(3, 64, 64, None) for i in range(layers)}
    step = torch.no_grad()(HFEngine.step.__wrapped__)  # type: ignore[attr-defined]
    with (
        pretended_gpu() as gpu,
        mock.patch.object(kind, "device", CARD),
        mock.patch.object(forward, "find_layers", lambda model: shapes),
        mock.patch.object(hf_engine, "find_passes", lambda model, n, _: (forward.SlotPasses(model, n), "")),
        mock.patch.object(HFEngine, "step", step),
    ):
        gpu.moved(model)
        yield HFEngine(model, slots=slots), gpu


def requests(count: int, settings: tuple[dict[str, float], ...] = ({},), length: int = 64) -> list[GenerationRequest]:
    """In groups of 4, with prompts of several lengths."""
    rng = np.random.default_rng(0)
    prompts = [Prompt("", "", rng.integers(2, 49152, 9 + 5 * i)) for i in range(-(-count // 4))]
    sampling = [SamplingParams(max_completion_length=length, **chosen) for chosen in settings]  # type: ignore[arg-type]
    return [GenerationRequest(i, i // 4, prompts[i // 4], i, sampling[i % len(sampling)]) for i in range(count)]


def decode_step(slots: int = 16, settings: tuple[dict[str, float], ...] = ({},), **model: object) -> Counts:
    with card_engine(slots, **model) as (engine, gpu):  # type: ignore[arg-type]
        engine.submit(requests(slots, settings))
        engine.step(0.0)
        counts = gpu.fresh()
        assert engine.step(0.0).tokens == slots
    return counts


@pytest.mark.parametrize("settings", [({},), ({"top_p": 0.9},), ({"top_k": 20},), MIXED, ({"repetition_penalty": 1.2},)])
def test_a_decode_step_waits_for_a_gpu_once_whatever_its_requests_ask(settings: tuple[dict[str, float], ...]) -> None:
    counts = decode_step(settings=settings)
    assert counts.waits == 1, counts.syncs
    assert not counts.blocking.total(), counts.blocking
    # The forward pass's numbers, the sampling settings; the tokens to penalise.
    assert counts.to_device.total() == (3 if "repetition_penalty" in settings[0] else 2)


def test_a_step_waits_once_also_while_rows_end_and_are_prefilled_and_moved() -> None:
    with card_engine(8) as (engine, gpu):
        for i, request in enumerate(requests(28)):
            sampling = SamplingParams(max_completion_length=2 + i % 5)
            engine.submit([GenerationRequest(i, i // 4, request.prompt, i, sampling)])
        counts, steps, done = gpu.fresh(), 0, 0
        while engine.in_flight():
            finished = engine.step(0.0).finished
            steps, done = steps + 1, done + sum(isinstance(result, Rollout) for result in finished)
    assert done == 28
    assert counts.waits == steps, counts.syncs
    assert not counts.blocking.total(), counts.blocking


@pytest.mark.parametrize(("family", "dtype"), list(LAUNCHES))
def test_launches_of_a_decode_step(family: str, dtype: torch.dtype) -> None:
    beside, layer = LAUNCHES[family, dtype]
    two = decode_step(family=family, dtype=dtype)
    four = decode_step(family=family, dtype=dtype, layers=4)
    assert (four.launched - two.launched) / 2 < 1.1 * layer, four.launches
    assert two.launched < 1.1 * (beside + 2 * layer), two.launches


@pytest.mark.parametrize("settings", [({},), MIXED, ({"repetition_penalty": 1.2},)])
def test_launches_do_not_grow_with_the_slots(settings: tuple[dict[str, float], ...]) -> None:
    few, many = decode_step(16, settings), decode_step(64, settings)
    assert few.launches == many.launches
