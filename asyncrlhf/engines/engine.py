"""The Engine protocol; an engine's base weights, kept beside it so that an adapter alone has to travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from asyncrlhf.data.adapter import is_adapter, merged
from asyncrlhf.data.data_config import LoraConfig
from asyncrlhf.types import FloatArray, GenerationFailure, GenerationRequest, IntArray, Rollout

CacheMode = Literal["keep", "recompute"]


@dataclass(frozen=True)
class StepOutput:
    """What one call of :meth:`Engine.step` brought.

    ``wake_at``: the clock time before which another step can bring nothing (the fake engine's next arrival), or None
    when the engine wants to be stepped again at once.
    """

    finished: list[Rollout | GenerationFailure] = field(default_factory=list)
    tokens: int = 0  # sampled in this step
    wake_at: float | None = None


class Engine(Protocol):
    """Continuous batching over ``slots`` sequences. Not thread-safe: one thread owns an engine and steps it.

    A request waits in the engine's own queue until a slot is free; a finished sequence's slot is refilled in the same
    step. Tokens are stamped with the version that the engine holds when they are sampled.
    """

    @property
    def version(self) -> int:
        """The policy version that the next token will carry."""
        ...

    @property
    def slots(self) -> int: ...

    def in_flight(self) -> list[int]:
        """Rollout ids submitted and not yet returned, oldest first."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A request that can never fit (prompt over the context) comes back as a failure; an id that is
        in flight already raises ValueError."""
        ...

    def step(self, now: float) -> StepOutput:
        """Advance by one iteration. ``now`` is the run's clock in seconds; only the fake engine looks at it."""
        ...

    def partial(self, seen: Mapping[int, int], at_least: int) -> dict[int, IntArray]:
        """What was sampled so far beyond the first ``seen[rollout_id]`` response tokens, [n] copied, of those in flight
        in ``seen`` that have at least so many more. Costs nothing unless it is asked."""
        ...

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        """Forget requests; returns those that were indeed in flight."""
        ...

    @property
    def asleep(self) -> bool: ...

    def sleep(self) -> None:
        """Sample nothing until :meth:`wake`, and leave the device's memory to the learner that takes turns with it.

        In-flight sequences stay with the tokens they have; those whose KV cache was lost are prefilled anew after the
        wake, under the weights that the engine holds then. Requests, loads and scores are still taken: what a load or a
        score needs is brought back for it. A second call does nothing.
        """
        ...

    def wake(self) -> None: ...

    def load_weights(self, version: int, weights: Mapping[str, torch.Tensor], cache: CacheMode) -> None:
        """Load every parameter by its name in ``model.named_parameters()``; raises WeightSyncError naming what is
        missing, unknown or of another shape. In-flight sequences go on from the tokens they have: with ``cache="keep"``
        on the old KV cache, with ``"recompute"`` after a new prefill under the new weights. An engine that makes tokens
        by the clock (``wake_at`` given) is stepped once more before, so that what was made by now keeps its version.
        """
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The engine's own tensors by name, for loading in place; empty for the fake engine."""
        ...

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        """Log-probs of each token given those before it, at temperature 1 without filters; [len-1] for each text."""
        ...

    def close(self) -> None: ...


class AdapterMerge:
    """Makes each version's whole weights out of the checkpoint's and the adapter that the learner sent.

    The base stays in the host's memory, once, in the engine's dtype: a version is computed from it and not from the
    version before, whose rounding would add up. Weights that are no adapter pass unchanged.
    """

    def __init__(self, config: LoraConfig, base: Mapping[str, torch.Tensor]) -> None:
        self._scaling = config.scaling
        self._base = {name: tensor.detach().to("cpu", copy=True) for name, tensor in base.items()}

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Raises WeightSyncError when the adapter does not fit the base."""
        return merged(self._base, weights, self._scaling) if is_adapter(weights) else weights
