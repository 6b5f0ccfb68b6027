"""What a step of the hf engine asks of a GPU: waits of the host, copies, launches; counted on a pretended one. What the
copies carry, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrlhf.engines.hf import forward, hf_engine, kv_cache, sampling
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.layer_shapes import LayerShape
from asyncrlhf.models import copies
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.pretended_gpu import CARD, Counts, PretendedGpu, pretended_gpu
from tests.vllm_tiny import VOCABULARY, tiny_model

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
CLASSES: dict[str, tuple[type, type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Launches of a decode step now: of a layer, and beside the layers. A tenth more or less fails: who lowers one lowers it
# here.
LAUNCHES = {
    ("llama", torch.float32): (18, 33),
    ("llama", torch.bfloat16): (20, 35),
    ("qwen3", torch.bfloat16): (57, 52),
}
Settings = Sequence[dict[str, float]]  # of the requests, in turn
PLAIN: Settings = ({},)
PENALTY: Settings = ({"repetition_penalty": 1.2}, {})
MIXED: Settings = ({}, {"top_k": 9}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.1})


@contextmanager
def card_engine(slots: int, family: str, dtype: torch.dtype, layers: int) -> Iterator[tuple[HFEngine, PretendedGpu]]:
    """Without the comparison at an engine's start, which needs values, and without inference mode, where only torch's
    own tensors exist."""
    config, kind = CLASSES[family]
    with torch.device("meta"):
        model = kind(config(num_hidden_layers=layers, **SHAPE)).to(dtype)
    shapes = {i: LayerShape(3, 64, 64, None) for i in range(layers)}
    step = torch.no_grad()(HFEngine.step.__wrapped__)  # type: ignore[attr-defined]
    with (
        pretended_gpu() as gpu,
        mock.patch.object(kind, "device", CARD),
        mock.patch.object(forward, "find_layers", lambda model: shapes),
        mock.patch.object(hf_engine, "find_passes", lambda model, n, *_: (forward.SlotPasses(model, n), "")),
        mock.patch.object(HFEngine, "step", step),
    ):
        gpu.moved(model)
        yield HFEngine(model, slots=slots), gpu


def requests(count: int, settings: Settings, lengths: Sequence[int], vocabulary: int) -> list[GenerationRequest]:
    """In groups of 4, with prompts of several lengths; settings and lengths in turn."""
    rng = np.random.default_rng(0)
    prompts = [Prompt("", "", rng.integers(2, vocabulary, 9 + 5 * i)) for i in range(-(-count // 4))]
    sampled = [
        SamplingParams(lengths[i % len(lengths)], **settings[i % len(settings)])  # type: ignore[arg-type]
        for i in range(count)
    ]
    return [GenerationRequest(i, i // 4, prompts[i // 4], i, sampled[i]) for i in range(count)]


def decode_step(
    slots: int = 16,
    settings: Settings = PLAIN,
    *,
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 2,
) -> Counts:
    with card_engine(slots, family, dtype, layers) as (engine, gpu):
        engine.submit(requests(slots, settings, [64], 49152))
        engine.step(0.0)
        counts = gpu.fresh()
        assert engine.step(0.0).tokens == slots
    return counts


@pytest.mark.parametrize("settings", [PLAIN, PENALTY, MIXED, MIXED[1:2], MIXED[2:3]])
def test_a_decode_step_waits_for_a_gpu_once_whatever_its_requests_ask(settings: Settings) -> None:
    counts = decode_step(settings=settings)
    assert counts.waits == 1, counts.syncs
    # The forward pass's numbers and the sampling settings; the tokens to penalise.
    assert counts.to_device.total() == 2 + (settings is PENALTY), counts.to_device


def test_a_step_waits_once_also_while_rows_end_and_are_prefilled_and_moved() -> None:
    with card_engine(8, "llama", torch.bfloat16, 2) as (engine, gpu):
        engine.submit(requests(28, PLAIN, [2, 3, 4, 5, 6], 49152))
        counts, steps, done = gpu.fresh(), 0, 0
        while engine.in_flight():
            finished = engine.step(0.0).finished
            steps, done = steps + 1, done + sum(isinstance(result, Rollout) for result in finished)
    assert done == 28
    assert counts.waits == steps, counts.syncs


@pytest.mark.parametrize(("family", "dtype"), list(LAUNCHES))
def test_no_count_of_launches_has_risen(family: str, dtype: torch.dtype) -> None:
    layer, beside = LAUNCHES[family, dtype]
    two, four = (decode_step(family=family, dtype=dtype, layers=layers) for layers in (2, 4))
    assert 0.9 * layer <= (four.launched - two.launched) / 2 <= 1.1 * layer, four.launches
    assert 0.9 * beside <= two.launched - 2 * layer <= 1.1 * beside, two.launches


@pytest.mark.parametrize("settings", [PLAIN, PENALTY, MIXED])
def test_launches_do_not_grow_with_the_slots(settings: Settings) -> None:
    few, many = decode_step(16, settings), decode_step(64, settings)
    assert few.launches == many.launches


class OnCard(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    device = property(lambda self: CARD)


def generated(settings: Settings) -> list[Rollout]:
    engine = HFEngine(tiny_model(), slots=6)
    engine.submit(requests(20, settings, [5, 9, 3, 12], VOCABULARY))
    done: list[Rollout] = []
    while engine.in_flight():
        done += [result for result in engine.step(0.0).finished if isinstance(result, Rollout)]
    assert len(done) == 20
    return sorted(done, key=lambda rollout: rollout.rollout_id)


@pytest.mark.parametrize("settings", [PLAIN, PENALTY, MIXED])
def test_what_a_gpu_gets_in_one_copy_is_what_a_cpu_reads(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of several types lie in the copies there and back."""
    expected = generated(settings)
    sent, packed, fetched = [], copies.all_to_device, copies.to_host

    def there(tensors: Sequence[torch.Tensor], _: torch.device) -> list[torch.Tensor]:
        sent.append(len(tensors))
        return packed(tensors, CARD)

    def back(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part.as_subclass(torch.Tensor) for part in fetched([x.as_subclass(OnCard) for x in tensors])]

    monkeypatch.setattr(copies, "to_device", lambda tensor, _: tensor)
    for module in (kv_cache, sampling):
        monkeypatch.setattr(module, "all_to_device", there)
    monkeypatch.setattr(sampling, "to_host", back)
    for rollout, own in zip(generated(settings), expected, strict=True):
        np.testing.assert_array_equal(rollout.response_ids, own.response_ids)
        np.testing.assert_array_equal(rollout.behavior_logprobs, own.behavior_logprobs)
        np.testing.assert_array_equal(rollout.kept_ids, own.kept_ids)  # type: ignore[arg-type]
        np.testing.assert_array_equal(rollout.kept_counts, own.kept_counts)  # type: ignore[arg-type]
    assert max(sent) > 3
