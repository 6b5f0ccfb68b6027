"""Streams through two buffers: how much memory they hold, what an engine makes of them, and a load that breaks off."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.engines.generator_config import FakeConfig
from asyncrlhf.engines.hf import HFEngine
from asyncrlhf.engines.weights import load_named_buckets
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.build_transport import build_receiver, build_sender
from asyncrlhf.transport.live import LiveHolder
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, SamplingParams

BUCKET = 1 << 18


def big_model() -> dict[str, torch.Tensor]:
    """4 MiB in 16 buckets of a quarter MiB each, and a tail."""
    return {f"layer{i}": torch.full((256, 128), float(i)) for i in range(32)} | {"tail": torch.ones(3)}


def held_bytes() -> int:
    """Bytes of all CPU tensors' storages that Python can reach, each once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("transport", "buffers"), [("collective", 4), ("disk", 1)])
def test_a_stream_holds_two_buckets_on_each_side(tmp_path: Path, transport: str, buffers: int) -> None:
    """Sender and receiver are in this process. The disk's sender needs one buffer, and its receiver maps the files,
    one bucket at a time."""
    params = big_model()
    disk = {"disk_path": str(tmp_path)} if transport == "disk" else {}
    config = WeightsConfig(transport=transport, staging="stream", bucket_mb=BUCKET / 2**20, **disk)
    before = held_bytes()
    sender, receiver = build_sender(config, "ray", params), build_receiver(config, "ray")
    endpoint = sender.listen("127.0.0.1")
    most, names = 0, []
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(receiver.connect, endpoint, 1, 2, 0, "g0")
        sender.connect(endpoint, ["g0"], 0)
        joining.result(timeout=90)
        sender.begin_snapshot(1, params)
        ticket = sender.ticket()
        transfer = pool.submit(sender.transfer, ticket)
        for bucket in receiver.stream(ticket):
            most = max(most, held_bytes() - before)
            names += list(bucket)
        transfer.result(timeout=90)
    sender.release(1)
    sender.close()
    receiver.close()
    mapped = BUCKET if transport == "disk" else 0
    assert names == list(params)
    assert BUCKET <= most <= buffers * BUCKET + mapped < held_bytes() / 3


def test_the_holder_shows_what_travels() -> None:
    params = {"a": torch.tensor([1 / 3]), "n": torch.arange(3)}
    from asyncrlhf.transport.snapshot import Wire

    holder = LiveHolder(build_manifest(params, 64, torch.bfloat16), Wire(torch.bfloat16))
    holder.begin_snapshot(1, params)
    shown = holder.tensors()
    assert torch.equal(shown["a"], torch.tensor([1 / 3]).to(torch.bfloat16)) and shown["n"].dtype == torch.int64
    holder.release(1)


def engine_of(path: Path) -> HFEngine:
    from transformers import AutoModelForCausalLM

    return HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), slots=4)


def in_buckets(weights: Mapping[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """As a transport gives them: each bucket's memory is another's when the next one is asked for."""
    names = list(weights)
    for start in range(0, len(names), size):
        bucket = {name: weights[name].clone() for name in names[start : start + size]}
        yield bucket
        for tensor in bucket.values():
            tensor.fill_(float("nan"))


def request(number: int, length: int) -> GenerationRequest:
    return GenerationRequest(number, 0, np.arange(3, 9), number, SamplingParams(length))


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_hf_loads_a_stream_as_it_loads_a_mapping(tiny_model_path: Path, cache: Any) -> None:
    whole, streamed = engine_of(tiny_model_path), engine_of(tiny_model_path)
    new = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in whole.parameters().items()}
    generations = []
    for engine, load in ((whole, whole.load_weights), (streamed, streamed.load_stream)):
        engine.submit([request(i, 8) for i in range(3)])
        for _ in range(3):
            engine.step(0.0)
        load(5, new if engine is whole else in_buckets(new, 4), cache)  # type: ignore[operator]
        done: list[Any] = []
        while engine.in_flight():
            done += engine.step(0.0).finished
        generations.append({g.rollout_id: g for g in done})
    for number in range(3):
        one, other = generations[0][number], generations[1][number]
        assert one.policy_versions.tolist() == other.policy_versions.tolist() == [0, 0, 0, 5, 5, 5, 5, 5]
        assert np.array_equal(one.response_ids, other.response_ids)
        assert np.array_equal(one.behavior_logprobs, other.behavior_logprobs)


def test_what_does_not_fit_is_named(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path)
    weights = dict(engine.parameters())
    first = next(iter(weights))
    for change, problem in (
        ({first: None}, f"missing: {first}"),
        ({"stranger": torch.zeros(1)}, "unknown: stranger"),
        ({first: torch.zeros(1)}, f"wrong shape: {first}"),
    ):
        changed = {name: t for name, t in {**weights, **change}.items() if t is not None}
        with pytest.raises(WeightSyncError, match=problem):
            load_named_buckets(engine._model, in_buckets(changed, 4))


class Broken:
    """A receiver whose first stream ends in the middle."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights, self.attempts = weights, 0

    def stream(self, ticket: Any) -> Iterator[Mapping[str, torch.Tensor]]:
        self.attempts += 1
        for place, bucket in enumerate(in_buckets(self.weights, 4)):
            if place == 2 and self.attempts == 1:
                raise WeightSyncError("Version 1 was lost on its way.")
            yield bucket


def test_a_load_that_breaks_off_samples_nothing_until_one_succeeds(tiny_model_path: Path) -> None:
    from asyncrlhf.actors.messages import WorkItem
    from asyncrlhf.transport.protocol import Ticket
    from asyncrlhf.types import Prompt

    engine = engine_of(tiny_model_path)
    new = {name: tensor * 1.5 for name, tensor in engine.parameters().items()}
    worker = GeneratorWorker("g0", engine, str, Broken(new), {}, streams=True)  # type: ignore[arg-type]
    worker.submit([WorkItem(request(0, 6), Prompt("p", "", np.arange(3, 9)))])
    worker.step(0.0)
    ticket = Ticket(1, 0, build_manifest(new, 1024))
    worker.receive(ticket)
    with pytest.raises(WeightSyncError, match="lost on its way"):
        worker.load(1, "keep", 0.0)
    assert not worker.has_work() and engine.version == 0 and engine.in_flight() == [0]
    with pytest.raises(WeightSyncError, match="received None"):
        worker.load(1, "keep", 0.0)
    worker.receive(ticket)
    worker.load(1, "keep", 0.0)
    while worker.has_work():
        worker.step(0.0)
    (rollout,), _ = worker.take()
    assert rollout.policy_versions.tolist() == [0, 1, 1, 1, 1, 1]
    assert all(torch.equal(engine.parameters()[name], tensor) for name, tensor in new.items())


def test_fake_takes_the_whole_stream_before_its_version_changes() -> None:
    engine = FakeEngine(FakeConfig(), slots=1, vocab_size=9)
    seen = []

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(3):
            seen.append(engine.version)
            yield {}

    engine.load_stream(4, buckets(), "keep")
    assert seen == [0, 0, 0] and engine.version == 4
