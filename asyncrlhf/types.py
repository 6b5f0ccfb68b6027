"""The data passed between the parts: prompts, rollouts, packed batches, weight manifests.

Shape legend, here and in every docstring: N rollouts (sequences), L tokens of one response, P tokens of one prompt,
T packed tokens of a batch, G rollouts of one group, V vocabulary. Token arrays are NumPy so that they cross process
boundaries without torch; times are seconds of the run's clock (wall clock under Ray, virtual under ``runtime=local``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.turns import EpisodeFacts, Fork, Turn, wrong_fork

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
IdArray = NDArray[np.int32]  # token ids, and counts of them, of which a batch has many
FinishReason = Literal["stop", "length"]
DropReason = Literal["stale", "untrainable", "failed", "shutdown", "rolled_back"]
OBSERVED = -1  # in ``policy_versions``: the token was not sampled, but observed within an episode


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised once where it is made."""

    prompt_id: str
    text: str
    token_ids: IntArray  # [P]
    answer: str | None = None  # reference answer for verifiable rewards
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the columns of its row, but for the prompt's
    messages: Sequence[Mapping[str, Any]] | None = None  # of a conversation; ``text`` is then its rendering


@dataclass(frozen=True)
class SamplingParams:
    """How a response is sampled. ``temperature=0`` is greedy; ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch the
    filters off. ``min_p`` drops the tokens below that share of the largest probability."""

    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen before, multiplies negative ones; 1 is off
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts that end a response; they stay part of it


@dataclass(frozen=True)
class GenerationRequest:
    """One response to be sampled. Its random draws depend only on ``seed``, not on the engine's batch.
    ``epoch``: the run's when the request was sent; its answer has the same one. So has ``tag``, which tells a turn of
    an episode from its other turns and attempts."""

    rollout_id: int
    group_id: int
    prompt: Prompt
    seed: int
    sampling: SamplingParams
    epoch: int = 0
    tag: int = 0

    @property
    def prompt_ids(self) -> IntArray:
        """[P]"""
        return self.prompt.token_ids


@dataclass(frozen=True)
class GenerationFailure:
    """A request that the engine could not finish; ``error`` is one sentence."""

    rollout_id: int
    error: str
    epoch: int = 0
    tag: int = 0


@dataclass(frozen=True)
class Rollout:
    """One finished response with all that training or a record needs; its engine's worker adds text and name.

    In an episode of several turns the response has sampled and observed stretches in turn (``turns``). An observed
    token has version ``OBSERVED``, log-prob 0 and no effect on the loss. ``forks``: where another branch begins, such
    as a sub-agent's. Each sampled token is in one branch: what others repeat of it is shared with it, or observed.

    With truncated sampling, the tokens allowed at each position are ragged ids: those of response token t are the
    ``kept_counts[t]`` ids after those of the previous tokens. A count of 0 means the whole vocabulary.
    """

    rollout_id: int
    group_id: int
    prompt: Prompt
    response_ids: IntArray  # [L], with the stop token if one was sampled
    behavior_logprobs: FloatArray  # [L] log mu after temperature, top-k, top-p and min-p
    policy_versions: IntArray  # [L] the version that sampled each token, or OBSERVED
    finish_reason: FinishReason
    response_text: str = ""
    generator_id: str = ""
    ref_logprobs: FloatArray | None = None  # [L] log pi_ref, once a reference service has computed it
    values: FloatArray | None = None  # [L] of the state in which each token was chosen, from a critic service
    critic_version: int | None = None  # of the critic that computed the values
    kept_ids: IdArray | None = None  # [K] in total; None without truncation
    kept_counts: IdArray | None = None  # [L]
    routed_experts: NDArray[np.unsignedinteger] | None = None  # [P+L-1, E] as ``models/routes.py`` lays them out
    epoch: int = 0  # of the request
    tag: int = 0  # of the request
    turns: tuple[Turn, ...] = ()  # of an episode
    episode_reward: float | None = None  # that its environment gave
    messages: tuple[Mapping[str, Any], ...] = ()  # of an episode: what was sampled and observed after the prompt
    environment: Mapping[str, Any] | None = None  # plain attributes of a user's environment at the episode's end
    forks: tuple[Fork, ...] = ()  # of an episode, in the order of their starts
    measured: Mapping[str, float] = field(default_factory=dict)  # by its engine, such as what a smaller cache does
    stayed: Mapping[str, NDArray[np.bool_]] | None = None  # [L] of a sample: tokens in the cache at the end, by layer

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """[L] which tokens of the response the policy sampled; the others were observed."""
        return np.not_equal(self.policy_versions, OBSERVED)

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.behavior_logprobs), len(self.policy_versions)}
        lengths |= {len(given) for given in (self.ref_logprobs, self.values, self.kept_counts) if given is not None}
        if len(lengths) != 1:
            raise ValueError(f"rollout {self.rollout_id}: response, log-probs and versions differ in length: {lengths}")
        kept = 0 if self.kept_ids is None else len(self.kept_ids)
        counted = 0 if self.kept_counts is None else int(self.kept_counts.sum())
        if kept != counted or (self.kept_ids is None) != (self.kept_counts is None):
            raise ValueError(f"rollout {self.rollout_id}: {kept} kept ids, where their counts say {counted}")
        inputs = len(self.prompt.token_ids) + len(self.response_ids) - 1
        if wrong := wrong_fork(self.forks, len(self.prompt.token_ids), self.sampled):
            raise ValueError(f"rollout {self.rollout_id}: {wrong} follows no token before it, or has no context")
        if self.routed_experts is not None and len(self.routed_experts) != inputs:
            raise ValueError(f"rollout {self.rollout_id}: experts of {len(self.routed_experts)} of {inputs} tokens")


@dataclass(frozen=True)
class Payload:
    """The place of a rollout's arrays: ``ref`` is an object reference (Ray) or the list itself (local).

    ``annotations``: the places of the arrays that services computed (reference log-probs, values).
    """

    ref: Any
    index: int
    annotations: tuple[Payload, ...] = ()


@dataclass
class RolloutInfo:
    """The controller's data of a finished rollout; its token arrays stay behind ``payload``. The assembly fills in
    times and reward; in the buffer it no longer changes: a batch has copies.

    ``finished_at_version`` is the learner's version when the rollout left its generator; it splits staleness into the
    part in flight and the part in the queue. ``weight`` and ``masked_before_version`` are those of the batch.
    """

    rollout_id: int
    group_id: int
    generator_id: str
    prompt_length: int
    response_length: int  # sampled tokens
    min_version: int
    max_version: int
    finish_reason: FinishReason
    generated_at: float
    payload: Payload
    admitted_at: float = 0.0
    finished_at_version: int = 0
    reward: float = math.nan
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)
    extra: str = ""
    scored_at: float | None = None  # None: not all kinds of workers have annotated it
    referenced_at: float | None = None  # if there is a reference service
    valued_at: float | None = None  # if there is a critic service
    weight: float = 1.0  # of its loss: down-weighting and replay correction
    masked_before_version: int = 0  # tokens older than this leave the loss (over_stale=mask)
    epoch: int = 0  # of the run when it was sent to its generator
    tag: int = 0  # of the request, if it is a turn of an episode
    observed_length: int = 0  # tokens of the response that were observed and not sampled
    episode: EpisodeFacts | None = None  # None: a plain answer

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response, sampled and observed."""
        return self.prompt_length + self.response_length + self.observed_length

    def staleness(self, version: int) -> int:
        """Staleness in the batch that moves the policy from ``version`` to ``version + 1``."""
        return version - self.min_version

    def staleness_in_flight(self) -> int:
        return self.finished_at_version - self.min_version

    def in_batch(self, weight: float = 1.0, masked_before_version: int = 0) -> RolloutInfo:
        """A copy for a batch, or without arguments for the buffer."""
        own = copy(self)
        own.weight, own.masked_before_version = weight, masked_before_version
        return own


@dataclass(frozen=True)
class RolloutGroup:
    """The finished siblings of one prompt; complete, unless a sibling failed.

    ``scheduled_step``: the step that it is generated for, in the scheduled modes. ``uses``: trainings so far, with the
    batch that took it. ``uses_left``, as returned by the buffer: those that may follow; for an evicted group those that
    the gate had counted.
    """

    group_id: int
    rollouts: tuple[RolloutInfo, ...]
    scheduled_step: int | None = None
    uses: int = 0
    uses_left: int = 0

    @cached_property
    def min_version(self) -> int:
        return min(r.min_version for r in self.rollouts)

    @cached_property
    def max_version(self) -> int:
        return max(r.max_version for r in self.rollouts)

    @property
    def replayed(self) -> bool:
        """Whether the batch that took it was not its first."""
        return self.uses > 1

    def staleness(self, version: int) -> int:
        return version - self.min_version

    def __len__(self) -> int:
        return len(self.rollouts)


@dataclass(frozen=True)
class BatchFault:
    """A call of the reward's ``part`` that failed as a whole, so that its rollouts were scored one by one; ``kind`` is
    raised, late or wrong_count, ``cause`` a sentence."""

    part: str
    kind: str
    cause: str


@dataclass(frozen=True)
class Annotation:
    """A worker's result for one rollout: its reward, or the place of the arrays that it computed (reference log-probs,
    values), or one sentence with the reason if there is neither (never a silent zero).

    ``logged``, ``extra``: what the reward functions logged: numbers by name, and an object in JSON.
    """

    rollout_id: int
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    arrays: Payload | None = None
    abstained: bool = False  # no part of the reward gave a score: not a failure, but nothing to train on
    logged: Mapping[str, float] = field(default_factory=dict)
    extra: str = ""
    faults: tuple[BatchFault, ...] = ()  # of the call, on its first rollout's annotation


@dataclass(frozen=True)
class TrainSample:
    """One rollout as the learner trains on it."""

    rollout: Rollout
    reward: float
    weight: float = 1.0  # down-weighting and replay correction; 1 for a fresh rollout
    masked_before_version: int = 0  # tokens older than this leave the loss (over_stale=mask)


@dataclass(frozen=True)
class TrainBatch:
    """Packed batch: sequence i is ``token_ids[cu_seqlens[i]:cu_seqlens[i+1]]``, prompt then response, no padding.

    Per-token arrays are aligned with the tokens: entry t belongs to the log-prob of token t given its sequence before;
    where sequences fork, given the tokens that it follows (``follows``).
    """

    token_ids: IntArray  # [T]
    cu_seqlens: IntArray  # [N+1]
    loss_mask: NDArray[np.bool_]  # [T] response tokens that train
    response_mask: NDArray[np.bool_]  # [T] sampled tokens; between them, an episode's observed tokens are no response
    behavior_logprobs: FloatArray  # [T] 0 on prompts and observed tokens
    policy_versions: IntArray  # [T] -1 on prompts and observed tokens
    rewards: FloatArray  # [N]
    weights: FloatArray  # [N]
    group_ids: IntArray  # [N]
    rollout_ids: IntArray  # [N]
    truncated: NDArray[np.bool_]  # [N] finish_reason == "length"
    ref_logprobs: FloatArray | None = None  # [T] 0 on prompts; None without a reference service
    values: FloatArray | None = None  # [T] 0 on prompts; None without a critic service
    critic_versions: IntArray | None = None  # [N] of the critic that computed each sequence's values
    kept_ids: IdArray | None = None  # [K] the tokens that truncated sampling allowed; None without truncation
    kept_counts: IdArray | None = None  # [T] number of them for each token; 0: the whole vocabulary, and on prompts
    routed_experts: NDArray[np.unsignedinteger] | None = None  # [T, E] of each token as input; 0 on the last ones
    turns: IntArray | None = None  # [T] the number of each token's turn, -1 on prompts and observed tokens
    turn_rewards: FloatArray | None = None  # [T] of each turn, on its last token; both None: credit goes to the whole
    follows: IntArray | None = None  # [T] the place in its sequence of the token that each follows; None: no forks

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a flat bucket: ``numel`` elements of ``dtype`` from byte ``offset`` of bucket ``bucket``."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name, such as "float32"
    bucket: int
    offset: int


@dataclass(frozen=True)
class WeightManifest:
    """The content of a weight transfer; the same on the sender and on every receiver."""

    tensors: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_bytes)
