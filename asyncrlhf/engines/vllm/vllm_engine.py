"""The vllm engine: exact version tags, processed log-probs and in-flight updates over vLLM's continuous batching."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrlhf.engines.engine import CacheMode, Engine, StepOutput, match_named_weights, match_names
from asyncrlhf.engines.vllm.adapter import meta_model
from asyncrlhf.engines.vllm.core import SCORE_SLOTS, VllmCore, tells_kept
from asyncrlhf.models.adapter import is_adapter
from asyncrlhf.models.weight_files import tied_names
from asyncrlhf.types import FloatArray, GenerationFailure, GenerationRequest, IdArray, Rollout

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

    from asyncrlhf.models.routes import RouteArray


@dataclass
class _Draft:
    """A request's tokens so far, from vLLM."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[IdArray] = field(default_factory=list)  # of each token, where sampling was truncated

    def take(self, ids: Sequence[int], entries: Any, version: int) -> None:
        """``entries``: vLLM's mapping from token ids to log-probs at each position; the sampled token is in it."""
        self.tokens.extend(ids)
        self.versions.extend([version] * len(ids))
        for token, entry in zip(ids, entries, strict=True):
            logprob = entry[token].logprob
            if tells_kept(self.request.sampling):
                kept = {i: told.logprob for i, told in entry.items() if told.logprob > -math.inf}
                self.kept.append(np.fromiter(kept, np.int32, len(kept)))
                # 1 up to rounding, unless more tokens tied at the threshold than were requested.
                logprob -= math.log(sum(map(math.exp, kept.values())))
            self.logprobs.append(logprob)


class VllmEngine(Engine):
    """``Engine`` over a vLLM that this thread steps; the engine owns ``core`` from then on.

    Requests wait here and go to vLLM when a slot is free, so that each starts with the newest weights' cache salt. A
    request's draws depend only on its seed. :meth:`score` steps vLLM: sequences in flight advance with it, and the next
    :meth:`step` returns their tokens and results.
    """

    def __init__(self, core: VllmCore, *, slots: int, version: int = 0) -> None:
        self._core = core
        self._skeleton = meta_model(core.folder, core.trust_remote_code)
        embedding: Any = self._skeleton.get_input_embeddings()  # type: ignore[operator]
        super().__init__(slots, version, core.context, int(embedding.num_embeddings))
        self.adapts = core.adapts
        self._drafts: dict[str, _Draft] = {}  # in vLLM, by request id
        self._scored: dict[str, FloatArray] = {}
        self._tokens = 0  # sampled and not yet reported
        self._scores = 0  # texts scored so far: names for the next ones
        # vLLM compiles a kernel at its first sampled and its first scored token: done before the run's clock starts.
        self.score([np.arange(2)])

    def step(self, now: float) -> StepOutput:
        if not self.asleep and not self.torn:
            while self._queue and len(self._drafts) < self.slots:
                request = self._queue.popleft()
                self._drafts[str(request.rollout_id)] = _Draft(request)
                self._core.generate(request, salt=str(self.version))
            if self._drafts:
                self._advance()
        tokens, self._tokens = self._tokens, 0
        return self._report(tokens)

    def _advance(self) -> None:
        """One iteration of vLLM. The present weights sampled all its tokens: vLLM samples within the step, and a load
        drains the batches under way first."""
        for output in self._core.step():
            if output.request_id in self._drafts:
                self._take(output)
            else:
                self._scored[output.request_id] = _prompt_logprobs(output)

    def _take(self, output: RequestOutput) -> None:
        draft = self._drafts[output.request_id]
        made = output.outputs[0]
        ids, before = list(made.token_ids), len(draft.tokens)
        draft.take(ids, made.logprobs, self.version)
        self._tokens += len(ids)
        at_stop = self._cut_at_stop(draft, before)
        if at_stop and not output.finished:
            self._core.abort([output.request_id])
        elif not output.finished:
            return
        del self._drafts[output.request_id]
        rollout_id = draft.request.rollout_id
        if not at_stop and made.finish_reason not in ("stop", "length"):
            self._finished.append(GenerationFailure(rollout_id, f"vLLM ended the request with {made.finish_reason!r}."))
            return
        self._finished.append(
            Rollout(
                rollout_id,
                draft.request.group_id,
                draft.request.prompt,
                response_ids=np.asarray(draft.tokens, np.int64),
                behavior_logprobs=np.asarray(draft.logprobs, np.float32),
                policy_versions=np.asarray(draft.versions, np.int64),
                finish_reason="stop" if at_stop or made.finish_reason == "stop" else "length",
                kept_ids=np.concatenate(draft.kept) if draft.kept else None,
                kept_counts=np.array([len(kept) for kept in draft.kept], np.int32) if draft.kept else None,
                routed_experts=_routes(made) if self._core.routes else None,
            )
        )

    def _cut_at_stop(self, draft: _Draft, before: int) -> bool:
        """Whether a token after the first ``before`` completes a stop text; the tokens after it are dropped."""
        if not draft.request.sampling.stop:
            return False
        for length in range(before + 1, len(draft.tokens) + 1):
            if self.ends_at_stop(draft.request, draft.tokens[:length]):
                for values in (draft.tokens, draft.logprobs, draft.versions, draft.kept):
                    del values[length:]
                return True
        return False

    def _sampled(self) -> Iterator[tuple[int, list[int]]]:
        for draft in self._drafts.values():
            yield draft.request.rollout_id, draft.tokens

    def _give_up(self, gone: set[int]) -> None:
        running = [str(rollout_id) for rollout_id in gone if str(rollout_id) in self._drafts]
        for name in running:
            del self._drafts[name]
        self._core.abort(running)

    def sleep(self, keep_weights: bool = True) -> None:
        if self.asleep:
            return
        self._core.drain(self._advance)
        kept = self._core.sleep(keep_weights=keep_weights)
        self.asleep, self.torn = True, self.torn or not kept

    def wake(self) -> None:
        if self.asleep:
            self._core.wake()
            self.asleep = False

    @contextmanager
    def _awake(self, *, weights_only: bool) -> Iterator[None]:
        """Within this context a sleeping engine has the memory that a call needs."""
        if not self.asleep:
            yield
            return
        self._core.wake(weights_only=weights_only)
        try:
            yield
        finally:
            self._core.drain(self._advance)
            self._core.sleep()

    def load_weights(self, version: int, weights: Mapping[str, torch.Tensor], cache: CacheMode) -> None:
        if self.adapts and is_adapter(weights):
            with self._loading(version, cache):
                self._core.load_adapter(version, weights)
            return
        tensors = match_named_weights(self._skeleton, weights)
        with self._loading(version, cache):
            self._core.update_weights(version, tensors)

    def join(self, weights: Any, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """Have the workers join a weight group, each as a receiver; see :meth:`VllmCore.join`."""
        self._core.join(weights, endpoint, rank, world_size, epoch, name)

    def receive_weights(self, ticket: Any, cache: CacheMode, seconds: float) -> None:
        """As ``load_weights``, but the workers receive the weights themselves; ``ticket``: of a transport."""
        entries = ticket.manifest.tensors
        names = match_names(self._skeleton, {entry.name: entry.shape for entry in entries})
        with self._loading(ticket.version, cache):
            self._core.receive_weights(ticket, names, seconds)

    @contextmanager
    def _loading(self, version: int, cache: CacheMode) -> Iterator[None]:
        """Load between two steps: tokens sampled before have the old version, tokens sampled after it the new one."""
        with self._awake(weights_only=True):
            if not self.torn:
                self._core.drain(self._advance)
                self._take_back_unstarted()
            self.torn = True
            yield
            self.torn, self.version = False, version
            self._core.forget_cache(running=cache == "recompute")

    def _take_back_unstarted(self) -> None:
        """Submit requests again that have no token yet and wait in vLLM because the batch is full: under the old salt
        they would start with keys and values that siblings made with the old weights."""
        names = [name for name, draft in self._drafts.items() if not draft.tokens]
        self._core.abort(names)
        self._queue.extendleft(self._drafts.pop(name).request for name in reversed(names))

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Copies, under the names of the checkpoint's parameters; also a tied head whose weights differ from the
        embedding."""
        with self._awake(weights_only=True):
            held = self._core.tensors()
        known = {name: held[name] for name, _ in self._skeleton.named_parameters() if name in held}
        for name, first in tied_names(self._skeleton).items():
            if name in held and first in known and not torch.equal(held[name], known[first]):
                known[name] = held[name]
        return known

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        # Several at once: each step for them also advances the requests in flight.
        results = [np.zeros(0, np.float32) for _ in token_ids]
        waiting = deque(i for i, text in enumerate(token_ids) if len(text) > 1)
        running: dict[str, int] = {}
        with self._awake(weights_only=False):
            while waiting or running:
                while waiting and len(running) < SCORE_SLOTS:
                    index = waiting.popleft()
                    name = f"score-{self._scores}"
                    self._scores += 1
                    running[name] = index
                    self._core.score(name, np.asarray(token_ids[index], np.int64))
                self._advance()
                for name in [name for name in running if name in self._scored]:
                    results[running.pop(name)] = self._scored.pop(name)
        return results

    def close(self) -> None:
        super().close()
        self._core.close()


def _routes(made: CompletionOutput) -> RouteArray:
    """[P+L-1, E] from vLLM's array [P+L-1, layers, chosen] of a finished response."""
    told = made.routed_experts
    assert told is not None, "vLLM did not report the experts of a response"
    return np.ascontiguousarray(told.reshape(len(told), -1))


def _prompt_logprobs(output: RequestOutput) -> FloatArray:
    """[P-1] of a scored text; the first position has none."""
    ids, entries = output.prompt_token_ids, output.prompt_logprobs
    assert ids is not None and entries is not None, "vLLM gave no log-probs of a scored text"
    found = [entry[token].logprob for token, entry in zip(ids[1:], entries[1:], strict=True) if entry is not None]
    return np.asarray(found, np.float32)
