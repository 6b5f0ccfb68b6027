"""The common part of all engines; weights by name, loaded in place; the merge of LoRA adapters that are sent alone; and
the engine that ``generator.engine`` names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from asyncrlhf.data.data_config import LoraConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.models.adapter import is_adapter, merged
from asyncrlhf.models.weight_files import tied_names
from asyncrlhf.types import FloatArray, GenerationFailure, GenerationRequest, IntArray, Rollout, SamplingParams

CacheMode = Literal["keep", "recompute"]
Decode = Callable[[Sequence[int]], str]
SPARE_TOKENS = 8  # checked beyond the length of a stop text


@dataclass(frozen=True)
class StepOutput:
    """The result of one call of :meth:`Engine.step`.

    ``wake_at``: the clock time before which no step can make progress (the fake engine's next arrival), or None if the
    next step may follow at once.
    """

    finished: list[Rollout | GenerationFailure] = field(default_factory=list)
    tokens: int = 0  # sampled in this step
    wake_at: float | None = None


class Engine(ABC):
    """Continuous batching over ``slots`` sequences. Not thread-safe: one thread owns an engine and steps it.

    A request waits in the engine's own queue until a slot is free; a finished sequence's slot is refilled in the same
    step. Tokens are tagged with the version that the engine holds when they are sampled.
    """

    note = ""  # for the user, such as why it is slow
    decode: Decode | None = None  # tokens to text, special ones included; for requests with ``stop`` texts

    def __init__(self, slots: int, version: int, context: int, vocabulary: int) -> None:
        """``context``: tokens of prompt and response together; ``vocabulary``: number of token ids in prompts."""
        self.slots = slots
        self.version = version  # the policy version that the next token will carry
        self.adapts = False  # whether ``load_weights`` takes an adapter as it is, beside the base weights
        self.asleep = False
        self.torn = False  # a load was interrupted: nothing is sampled before a complete one
        self._context = context
        self._vocabulary = vocabulary
        self._queue: deque[GenerationRequest] = deque()  # waiting for a slot
        self._order: dict[int, None] = {}  # rollout ids in flight, oldest first
        self._finished: list[Rollout | GenerationFailure] = []  # for the next step to return

    def in_flight(self) -> list[int]:
        """Rollout ids submitted and not yet returned, oldest first."""
        return list(self._order)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A request that can never fit (prompt over the context) is returned as a failure; an id that
        is already in flight raises ValueError."""
        for request in requests:
            if request.rollout_id in self._order:
                raise ValueError(f"rollout {request.rollout_id} is already in flight in this engine")
            self._order[request.rollout_id] = None
            problem = self._refusal(request)
            if problem is None:
                self._queue.append(request)
            else:
                self._finished.append(GenerationFailure(request.rollout_id, problem))

    def _refusal(self, request: GenerationRequest) -> str | None:
        prompt, wanted = request.prompt_ids, request.sampling.max_completion_length
        if not len(prompt):
            return "The prompt is empty; the model needs at least one token to go on from."
        if len(prompt) + wanted > self._context:
            return (
                f"The prompt's {len(prompt)} tokens and max_completion_length={wanted} do not fit "
                f"the engine's context of {self._context} tokens."
            )
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            return f"The prompt holds a token id outside the model's vocabulary of {self._vocabulary}."
        if request.sampling.stop and self.decode is None:
            return "The engine has no tokenizer, so it cannot find stop texts."
        return None

    def ends_at_stop(self, request: GenerationRequest, sampled: Sequence[int] | IntArray) -> bool:
        """Whether the newest token of the response completes one of the request's stop texts."""
        stop = request.sampling.stop
        if not stop or self.decode is None:
            return False
        # Most tokens have at least a character; some have none, such as parts of a letter.
        tail = self.decode([int(token) for token in sampled[-max(map(len, stop)) - SPARE_TOKENS :]])
        return any(text in tail for text in stop)

    @abstractmethod
    def step(self, now: float) -> StepOutput:
        """Advance by one iteration. ``now`` is the run's clock in seconds; only the fake engine uses it."""

    def _report(self, tokens: int = 0, wake_at: float | None = None) -> StepOutput:
        """The output of a step: all results since the previous one."""
        finished, self._finished = self._finished, []
        for result in finished:
            del self._order[result.rollout_id]
        return StepOutput(finished, tokens, wake_at)

    def partial(self, seen: Mapping[int, int], at_least: int) -> dict[int, IntArray]:
        """For each rollout in ``seen``, the response tokens after the first ``seen[rollout_id]``, [n] copied, if there
        are at least ``at_least`` of them."""
        found: dict[int, IntArray] = {}
        for rollout_id, ids in self._sampled():
            before = seen.get(rollout_id)
            if before is not None and len(ids) - before >= at_least:
                found[rollout_id] = np.array(ids[before:], np.int64)
        return found

    @abstractmethod
    def _sampled(self) -> Iterator[tuple[int, Sequence[int] | IntArray]]:
        """Rollout id and response tokens so far of each sequence that has a slot."""

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        """Forget requests; returns those that were in flight."""
        known = [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in self._order]
        gone = set(known)
        for rollout_id in known:
            del self._order[rollout_id]
        self._queue = deque(request for request in self._queue if request.rollout_id not in gone)
        self._finished = [result for result in self._finished if result.rollout_id not in gone]
        self._give_up(gone)
        return known

    @abstractmethod
    def _give_up(self, gone: set[int]) -> None:
        """Free the slots of the rollouts ``gone`` that have one."""

    @abstractmethod
    def sleep(self, keep_weights: bool = True) -> None:
        """Stop sampling until :meth:`wake`, and free the device's memory for the learner that shares it. Without
        ``keep_weights`` the weights may be dropped, too: then the engine samples nothing before the next load.

        In-flight sequences keep their tokens; those whose KV cache was lost are prefilled again after the wake, with
        the weights that the engine then holds. Requests, loads and scores are still accepted: a load or a score brings
        back the memory that it needs. Idempotent.
        """

    @abstractmethod
    def wake(self) -> None: ...

    @abstractmethod
    def load_weights(self, version: int, weights: Mapping[str, torch.Tensor], cache: CacheMode) -> None:
        """Load every parameter by its name in ``model.named_parameters()``; raises WeightSyncError naming a parameter
        that is missing, unknown or of another shape. In-flight sequences continue from their tokens: with
        ``cache="keep"`` on the old KV cache, with ``"recompute"`` after a new prefill with the new weights. First
        step an engine that makes tokens by the clock (``wake_at`` given), so that tokens up to now keep
        their version."""

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The engine's own tensors by name, for loading in place; empty for the fake engine."""

    @abstractmethod
    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        """Log-probs of each token given those before it, at temperature 1 without filters; [len-1] for each text."""

    def close(self) -> None:
        """Forget every request and free the engine's resources."""
        self.cancel(self.in_flight())


class AdapterMerge:
    """Computes each version's whole weights from the checkpoint's weights and the adapter that the learner sent.

    The base stays once in the host's memory, in the engine's dtype: a version is computed from it and not from the
    previous version, whose rounding would add up. Weights that are not an adapter pass unchanged.
    """

    def __init__(self, config: LoraConfig, base: Mapping[str, torch.Tensor]) -> None:
        self._scaling = config.scaling
        self._base = {name: tensor.detach().to("cpu", copy=True) for name, tensor in base.items()}

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Raises WeightSyncError when the adapter does not fit the base."""
        return merged(self._base, weights, self._scaling) if is_adapter(weights) else weights


def said_ids(rollout: Rollout, sampling: SamplingParams) -> IntArray:
    """The response's ids [L or L-1] without the stop token at its end: a model may end its answers with a token that
    its tokenizer would write as text."""
    ids = rollout.response_ids
    ended = rollout.finish_reason == "stop" and len(ids) and int(ids[-1]) in sampling.stop_token_ids
    return ids[:-1] if ended else ids


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters by name, tied ones once under their first name."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def match_named_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``weights`` under the names of the parameters, each once; a tied tensor may have any of its names.

    Raises as :func:`match_names`.
    """
    names = match_names(model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    return {own: weights[given] for given, own in names.items()}


def match_names(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The names of ``shapes`` that fill the parameters, one per parameter, with the parameter's own name.

    Raises WeightSyncError naming a parameter that is missing, unknown or of another shape.
    """
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tied = tied_names(model)
    given = {tied[name]: name for name in shapes if name in tied} | {name: name for name in shapes if name not in tied}
    if apart := misfit(own, {name: shapes[theirs] for name, theirs in given.items()}):
        raise WeightSyncError(f"The weights do not fit the engine's model ({apart}).")
    return {given[name]: name for name in own}


def misfit(own: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> str:
    """What is missing, unknown or of another shape in ``given``, in words; empty if nothing is."""
    wrong = [f"{n} is {given[n]} instead of {own[n]}" for n in own if n in given and given[n] != own[n]]
    missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
    return "; ".join(
        f"{kind}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong))
        if names
    )


def load_named_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` into the parameters; the dtype may differ, names and shapes may not.

    Writes nothing unless everything fits: raises as :func:`match_named_weights`.
    """
    given = match_named_weights(model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
