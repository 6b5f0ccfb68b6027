"""A generator replica without threads: an engine, the weights it waits for, and what it has in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncrlhf.actors.messages import WorkItem
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_model, load_tokenizer
from asyncrlhf.engines.build_engine import build_engine
from asyncrlhf.engines.engine import AdapterMerge, Engine, StepOutput
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.readahead.messages import Chunk
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket, WeightReceiver
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import (
    FloatArray,
    Generation,
    GenerationFailure,
    GenerationRequest,
    IntArray,
    Payload,
    Prompt,
    Rollout,
    RolloutInfo,
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
    """One replica without threads: whoever owns it calls :meth:`step` while :meth:`has_work`.

    Requests with negative ids are evaluations: they are answered through :meth:`take_private`, never collected.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        receiver: WeightReceiver,
        prompts: dict[int, tuple[int, Prompt]],
        merge: AdapterMerge | None = None,
        streams: bool = False,
        chunk_tokens: int = 0,
    ) -> None:
        self.name = name
        self.engine = engine
        self.receiver = receiver
        self.tokens = 0
        self._decode = decode
        self._merge = merge  # when the learner sends an adapter
        self._prompts = prompts  # of what is in flight, by rollout id: group id and prompt
        self._finished: list[Rollout] = []
        self._failed: list[GenerationFailure] = []
        self._private: dict[int, Rollout | GenerationFailure] = {}
        self._staged: tuple[int, Any] | None = None
        self._streams = streams  # weights.staging=stream
        self._chunk_tokens = chunk_tokens  # 0: nothing is sent before the end
        self._sent: dict[int, int] = {}  # response tokens that went out in chunks, of what is in flight
        self._torn = False  # the engine holds a part of a version
        self._timed = False  # the engine makes tokens by the clock and not by steps (the fake one)

    def has_work(self) -> bool:
        """Whether a step would bring tokens nearer: what is in flight in an engine that is awake."""
        return bool(self._prompts) and not self.engine.asleep and not self._torn

    def has_results(self) -> bool:
        return bool(self._finished or self._failed)

    def submit(self, items: Sequence[WorkItem]) -> None:
        for item in items:
            self._prompts[item.request.rollout_id] = (item.request.group_id, item.prompt)
            if self._chunk_tokens and item.request.rollout_id >= 0:
                self._sent[item.request.rollout_id] = 0
        self.engine.submit([item.request for item in items])

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = self.engine.cancel(rollout_ids)
        for rollout_id in gone:
            del self._prompts[rollout_id]
            self._sent.pop(rollout_id, None)
        wanted = set(rollout_ids)
        uncollected = [r.rollout_id for r in self._finished if r.rollout_id in wanted]
        uncollected += [f.rollout_id for f in self._failed if f.rollout_id in wanted]
        self._finished = [r for r in self._finished if r.rollout_id not in wanted]
        self._failed = [f for f in self._failed if f.rollout_id not in wanted]
        return gone + uncollected

    def step(self, now: float) -> StepOutput:
        output = self.engine.step(now)
        self._timed = output.wake_at is not None
        self.tokens += output.tokens
        for result in output.finished:
            group_id, prompt = self._prompts.pop(result.rollout_id)
            self._sent.pop(result.rollout_id, None)
            self._file(result if isinstance(result, GenerationFailure) else self._rollout(result, group_id, prompt))
        return output

    def _file(self, result: Rollout | GenerationFailure) -> None:
        if result.rollout_id < 0:
            self._private[result.rollout_id] = result
        elif isinstance(result, GenerationFailure):
            self._failed.append(result)
        else:
            self._finished.append(result)

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

    def take(self) -> tuple[list[Rollout], list[GenerationFailure]]:
        """What finished since the last call."""
        taken = self._finished, self._failed
        self._finished, self._failed = [], []
        return taken

    def take_chunks(self) -> list[Chunk]:
        """What was sampled since the last call, of each sequence under way that has ``chunk_tokens`` more of it."""
        chunks = []
        for rollout_id, ids in self.engine.partial(self._sent, self._chunk_tokens).items() if self._sent else ():
            prompt, sent = self._prompts[rollout_id][1].token_ids, self._sent[rollout_id]
            self._sent[rollout_id] = sent + len(ids)
            whole = np.concatenate([prompt, ids]) if sent == 0 else ids
            chunks.append(Chunk(rollout_id, 0 if sent == 0 else len(prompt) + sent, len(prompt), whole))
        return chunks

    def take_private(self, rollout_ids: Sequence[int]) -> list[Rollout] | None:
        """The evaluation's rollouts once none is under way, without those that could not be sampled; else None."""
        if not all(i in self._private for i in rollout_ids):
            return None
        results = [self._private.pop(i) for i in rollout_ids]
        return [r for r in results if isinstance(r, Rollout)]

    def receive(self, ticket: Ticket) -> None:
        """Take a version into staging memory; where weights are streamed nothing happens before ``load``."""
        take = self.receiver.stream if self._streams else self.receiver.receive
        self._staged = (ticket.version, take(ticket))

    def load(self, version: int, cache: Literal["keep", "recompute"], now: float) -> None:
        if self._timed and self.has_work():
            self.step(now)  # what was made by now was made by the old version
        if self._staged is None or self._staged[0] != version:
            held = None if self._staged is None else self._staged[0]
            raise WeightSyncError(f"{self.name} was asked to load version {version} but received {held}.")
        weights = self._staged[1]
        if self._streams:
            self._load_stream(version, weights, cache)
            return
        self.engine.load_weights(version, weights if self._merge is None else self._merge(weights), cache)

    def _load_stream(self, version: int, buckets: Any, cache: Literal["keep", "recompute"]) -> None:
        """Between the first bucket and the last the engine holds neither version: it samples nothing until a load has
        come to its end, this one or the next."""
        self._torn, self._staged = True, None
        with closing(buckets):  # a load that fails tells the sender so at once
            self.engine.load_stream(version, buckets, cache)
        self._torn = False

    def sleep(self, now: float) -> None:
        """Stop sampling and give the device's memory back; what is in flight goes on after :meth:`wake`."""
        if self._timed and self.has_work():
            self.step(now)
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


def build_worker(spec: GeneratorSpec) -> GeneratorWorker:
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
    streams = spec.weights.streams
    return GeneratorWorker(spec.name, engine, decode, receiver, prompts, merge, streams, spec.chunk_tokens)


def describe(rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    """The facts that the controller keeps; the caller sets the payload and the time."""
    return [
        RolloutInfo(
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            generator_id=r.generator_id,
            prompt_length=len(r.prompt.token_ids),
            response_length=len(r.response_ids),
            min_version=int(r.policy_versions.min(initial=np.iinfo(np.int64).max)),
            max_version=int(r.policy_versions.max(initial=0)),
            finish_reason=r.finish_reason,
            generated_at=0.0,
            payload=Payload(None, i),
        )
        for i, r in enumerate(rollouts)
    ]
