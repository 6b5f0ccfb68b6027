"""vLLM's workers as members of the weight group: two parallel ones in flight, one killed in mid-load; mixtures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrlhf.actors.build_generator import build_worker
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.protocol import LostReceiversError, worker_name
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.vllm_tiny import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.thorough]

TEXT = np.random.default_rng(0).integers(3, 15, 40)
NAME, AGREE = "generator-0", 1e-4


@torch.no_grad()
def reference(model: Any, text: np.ndarray) -> np.ndarray:
    logits = model(torch.from_numpy(text)[None]).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(text)[1:, None])[:, 0].numpy()


class Pair:
    """A learner's sender and one replica, whose ``workers`` are its receivers."""

    def __init__(self, model: Any, path: str, workers: int, transport: str) -> None:
        own = VllmConfig(
            engine_kwargs={"block_size": 32}, kv_cache_gb=0.05, max_model_len=128, tensor_parallel_size=workers
        )
        generator = GeneratorConfig(engine="vllm", slots=6, threads=0, vllm=own)
        weights = WeightsConfig(transport=transport, bucket_mb=0.02, checksum=True, timeout_seconds=60)
        self.model, self.pool = model, ThreadPoolExecutor(2)
        spec = GeneratorSpec(NAME, generator, ModelConfig(path=path), "ray", weights)
        self.worker: GeneratorWorker = build_worker(spec)
        self.sender = build_sender(weights, "ray", named_weights(model))
        endpoint = self.sender.listen("127.0.0.1")
        self.worker.connect(endpoint, 1, workers + 1, 1)  # returns at once, while others are missing
        self.sender.connect(endpoint, [worker_name(NAME, i) for i in range(workers)], 1)

    def publish(self, version: int) -> Future[Any]:
        """Move the model, and offer it; the future is the transfer's."""
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * parameter.abs().mean() * torch.randn(parameter.shape, generator=noise))
        self.sender.snapshot(version, named_weights(self.model))
        ticket = self.sender.ticket()
        self.worker.receive(ticket)
        return self.pool.submit(self.sender.transfer, ticket)

    def apart(self) -> float:
        return float(np.abs(self.worker.score([TEXT])[0] - reference(self.model, TEXT)).max())

    def close(self) -> None:
        self.sender.close()
        self.worker.close()
        self.pool.shutdown()


def requests(count: int, longest: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_completion_length=longest)
    return [GenerationRequest(i, i, Prompt("", "", TEXT[:5]), i, sampling) for i in range(count)]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def die_at_second_bucket(worker: Any) -> None:
    """Runs in vLLM's workers: the last one is killed when part of the weights is loaded."""
    inner, seen = worker.worker, []

    def update_weights(info: Any) -> None:
        seen.append(1)
        if len(seen) == 2 and inner.rank > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        type(inner).update_weights(inner, info)

    inner.update_weights = update_weights


def test_two_workers_take_twenty_versions_in_flight_and_one_dies_in_the_middle(pairs: list[Pair]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    pair = Pair(load_model(ModelConfig()), ModelConfig().path, 2, "collective")
    torch.set_num_threads(before)
    pairs.append(pair)
    worker = pair.worker
    # A lambda, because the import of this module would limit the workers' threads.
    assert worker.engine._core._llm.collective_rpc(lambda _: torch.get_num_threads()) == [2, 2]  # type: ignore[attr-defined]
    worker.submit(requests(6, 100))
    for version in range(1, 21):
        for _ in range(3):
            worker.step()
        sending = pair.publish(version)
        worker.load(version, "keep")
        sending.result(timeout=60)
        assert pair.apart() < AGREE
    assert len(worker.engine.in_flight()) == 6
    assert differing_tensors(tensor_digests(named_weights(pair.model)), worker.digests()) == []
    done: list[Rollout] = []
    while worker.has_work():
        done += [r for r in worker.step().finished if isinstance(r, Rollout)]
    for result in done:
        counts = np.bincount(result.policy_versions)
        assert (counts[:20] >= 3).all() and len(counts) == 21 and (np.diff(result.policy_versions) >= 0).all()

    worker.engine._core._llm.collective_rpc(die_at_second_bucket)  # type: ignore[attr-defined]
    worker.submit(requests(2, 50))
    sending = pair.publish(21)
    with pytest.raises(WeightSyncError, match="did not load version 21"):
        worker.load(21, "keep")
    with pytest.raises(LostReceiversError, match=f"{NAME}/1 died"):
        sending.result(timeout=60)
    assert worker.engine.torn and not worker.has_work(), "half of one version would go on sampling"


def test_the_experts_of_a_mixture_are_loaded_and_audited(tmp_path: Path, pairs: list[Pair]) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, initializer_range=0.3, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path)
    pair = Pair(model, str(tmp_path), 1, "shared_memory")
    pairs.append(pair)
    assert pair.apart() < AGREE
    held = pair.worker.digests()
    assert "model.layers.1.mlp.experts.gate_up_proj" in held
    assert differing_tensors(tensor_digests(named_weights(model)), held) == []
    pair.worker.submit(requests(4, 60))
    for version in (1, 2, 3):
        pair.worker.step()
        sending = pair.publish(version)
        pair.worker.load(version, "keep")
        sending.result(timeout=60)
        assert pair.apart() < AGREE
        assert differing_tensors(tensor_digests(named_weights(model)), pair.worker.digests()) == []
