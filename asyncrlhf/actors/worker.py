"""A generator replica without threads: an engine, the weights it waits for, and what it has in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import WorkItem
from asyncrlhf.actors.outbox import Outbox
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_model, load_tokenizer
from asyncrlhf.engines.build_engine import build_engine
from asyncrlhf.engines.engine import AdapterMerge, CacheMode, Engine, StepOutput
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import (
    FloatArray,
    Generation,
    GenerationFailure,
    GenerationRequest,
    IntArray,
    Prompt,
    Rollout,
)


@dataclass(frozen=True)
class GeneratorSpec:
    """Everything a replica needs to start on any machine."""

    name: str
    generator: GeneratorConfig
    model: ModelConfig
    runtime: str
    weights: WeightsConfig
    chunk_tokens: int = 0  # sampled tokens after which a sequence is sent on (fusion.granularity=chunk); 0: at its end


class GeneratorWorker:
    """One replica without threads: its owner calls :meth:`step` while :meth:`has_work` and counts the time in
    ``busy_seconds``. What was finished lies in ``outbox``."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        receiver: WeightReceiver,
        prompts: dict[int, tuple[int, Prompt]],
        merge: AdapterMerge | None = None,
        chunk_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.engine = engine
        self.receiver = receiver
        self.outbox = Outbox()
        self.tokens = 0
        self.busy_seconds = 0.0
        self._clock = clock
        self._decode = decode
        self._merge = merge  # when the learner sends an adapter
        self._prompts = prompts  # of what is in flight, by rollout id: group id and prompt
        self._staged: tuple[int, Any] | None = None
        self._chunk_tokens = chunk_tokens  # 0: nothing is sent before the end
        self._sent: dict[int, int] = {}  # response tokens that went out in chunks, of what is in flight
        self._timed = False  # the engine makes tokens by the clock and not by steps (the fake one)

    def has_work(self) -> bool:
        """Whether a step would bring tokens nearer: what is in flight in an engine that is awake."""
        return bool(self._prompts) and not self.engine.asleep

    def submit(self, items: Sequence[WorkItem]) -> None:
        for item in items:
            self._prompts[item.request.rollout_id] = (item.request.group_id, item.prompt)
            if self._chunk_tokens and item.request.rollout_id >= 0:
                self._sent[item.request.rollout_id] = 0
        self.engine.submit([item.request for item in items])

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        """Returns the ids of those that were not collected yet, and now never will be."""
        gone = self.engine.cancel(rollout_ids)
        for rollout_id in gone:
            del self._prompts[rollout_id]
            self._sent.pop(rollout_id, None)
        return gone + self.outbox.withdraw(rollout_ids)

    def step(self) -> StepOutput:
        output = self.engine.step(self._clock())
        self._timed = output.wake_at is not None
        self.tokens += output.tokens
        results: list[Rollout | GenerationFailure] = []
        for result in output.finished:
            group_id, prompt = self._prompts.pop(result.rollout_id)
            self._sent.pop(result.rollout_id, None)
            if isinstance(result, Generation):
                results.append(self._rollout(result, group_id, prompt))
            else:
                results.append(result)
        self.outbox.put(results, self._clock())
        return output

    def _rollout(self, result: Generation, group_id: int, prompt: Prompt) -> Rollout:
        return Rollout(
            rollout_id=result.rollout_id,
            group_id=group_id,
            prompt=prompt,
            response_ids=result.response_ids,
            behavior_logprobs=result.behavior_logprobs,
            policy_versions=result.policy_versions,
            finish_reason=result.finish_reason,
            response_text=self._decode(result.response_ids.tolist()),
            generator_id=self.name,
            kept_ids=result.kept_ids,
            kept_counts=result.kept_counts,
        )

    def send_chunks(self) -> None:
        """Put into the outbox, of each sequence under way that has ``chunk_tokens`` more of it, what was sampled since
        the last call."""
        chunks = []
        for rollout_id, ids in self.engine.partial(self._sent, self._chunk_tokens).items() if self._sent else ():
            prompt, sent = self._prompts[rollout_id][1].token_ids, self._sent[rollout_id]
            self._sent[rollout_id] = sent + len(ids)
            whole = np.concatenate([prompt, ids]) if sent == 0 else ids
            chunks.append(Chunk(rollout_id, 0 if sent == 0 else len(prompt) + sent, len(prompt), whole.tolist()))
        self.outbox.put_chunks(chunks)

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int) -> None:
        """Enter the weight group of ``epoch``."""
        self.receiver.connect(endpoint, rank, world_size, epoch, self.name)

    def receive(self, ticket: Ticket) -> None:
        """Take a version into staging memory."""
        self._staged = (ticket.version, self.receiver.receive(ticket))

    def load(self, version: int, cache: CacheMode) -> None:
        """Load the received version between two tokens. Raises WeightSyncError when that version was not received."""
        self._catch_up()
        if self._staged is None or self._staged[0] != version:
            held = None if self._staged is None else self._staged[0]
            raise WeightSyncError(f"{self.name} was asked to load version {version} but received {held}.")
        weights = self._staged[1]
        self.engine.load_weights(version, weights if self._merge is None else self._merge(weights), cache)

    def _catch_up(self) -> None:
        """What a timed engine has made by now was made by its present version."""
        if self._timed and self.has_work():
            self.step()

    def sleep(self) -> None:
        """Stop sampling and give the device's memory back; what is in flight goes on after :meth:`wake`."""
        self._catch_up()
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self.engine.score(texts)

    def digests(self) -> dict[str, str]:
        """Of what the engine holds, under the names that the learner sends. An adapter's tensors were merged into
        others: beside them stand the weights that are not bit for bit what the adapter makes of the base."""
        held = self.engine.parameters()
        found = tensor_digests(held)
        if self._merge is None or self._staged is None:
            return found
        wrong = differing_tensors(tensor_digests(self._merge(self._staged[1])), found)
        sent = tensor_digests(self._staged[1], next(iter(held.values())).dtype)
        return sent | {name: found.get(name, "") for name in wrong}

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


def build_worker(spec: GeneratorSpec, clock: Callable[[], float] = time.monotonic) -> GeneratorWorker:
    """Load the model and the engine; the caller has set the process's thread count."""
    tokenizer = load_tokenizer(spec.model)
    device = "cuda" if spec.generator.gpus > 0 else "cpu"
    prompts: dict[int, tuple[int, Prompt]] = {}

    def answer_ids(request: GenerationRequest) -> IntArray | None:
        answer = prompts[request.rollout_id][1].answer
        if answer is None:
            return None
        return np.array(tokenizer.encode(answer, add_special_tokens=False), dtype=np.int64)

    engine = build_engine(
        spec.generator,
        spec.model,
        load_model=lambda model: load_model(model, device),
        vocab_size=len(tokenizer),
        answer_ids=answer_ids,
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    adapted = spec.model.lora.r > 0 and spec.generator.engine != "fake"
    merge = AdapterMerge(spec.model.lora, engine.parameters()) if adapted else None
    receiver = build_receiver(spec.weights, spec.runtime, device)
    return GeneratorWorker(spec.name, engine, decode, receiver, prompts, merge, spec.chunk_tokens, clock)
