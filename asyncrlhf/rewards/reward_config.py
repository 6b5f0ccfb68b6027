"""Settings of rewards and of how scoring is fused with generation: ``reward.*`` and ``fusion.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.service_config import HttpConfig, JudgeConfig, RewardModelConfig
from asyncrlhf.validation import check, check_choice, check_range, overlay

GRANULARITIES = ("batch", "group", "rollout", "chunk")
KINDS = ("task", "python", "model", "judge", "http")
NORMALIZATIONS = ("none", "running", "batch", "group")
# Names that Annotation.parts gives to the penalties, so no part of the user's may have them.
PENALTIES = ("missing_eos", "overlong")


@dataclass(frozen=True)
class RewardPart:
    """One source of scores. ``kind=length``, in a sum alone, is the number of response tokens."""

    kind: str = "task"
    weight: float = 1.0
    target: str = ""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    http: HttpConfig = field(default_factory=HttpConfig)

    def check(self, key: str, kinds: tuple[str, ...]) -> None:
        """Raise ConfigError, naming settings under ``key``, unless what ``kind`` reads is there."""
        check_choice(f"{key}.kind", self.kind, kinds)
        check_range(f"{key}.weight", self.weight)
        check(
            self.kind != "python" or ":" in self.target,
            f"{key}.kind=python needs {key}.target=package.module:function.",
        )
        check(
            self.kind != "model" or self.model.path,
            f"{key}.kind=model needs {key}.model.path: a sequence-classification checkpoint with one label.",
        )
        if self.kind == "judge":
            self.judge.check(f"{key}.judge")
        if self.kind == "http" or (self.kind == "judge" and self.judge.engine == "http"):
            self.http.check(f"{key}.http")


@dataclass(frozen=True)
class RewardConfig:
    """Where rewards come from, and what becomes of a score that fails.

    ``kind``: ``task``, the task's own rule; ``python``, the function that ``target`` (``package.module:function``)
    names; ``model``, a sequence-classification checkpoint; ``judge``, a generative model that is asked for a score;
    ``http``, a remote endpoint; ``sum``, the weighted sum of ``parts``, each a name with ``kind``, ``weight`` and what
    that kind reads. ``on_failure=skip``: a rollout without a score fails and the run goes on; ``stop``: the first one
    ends the run. ``normalize`` changes what the learner trains on; records and metrics keep the reward as scored.
    """

    kind: str = "task"
    target: str = ""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    parts: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    threads: int = 0  # CPU threads of one worker's models; 0 leaves torch's choice
    gpus: float = 0.0  # GPUs of one worker; 0 runs its models on the CPU
    max_restarts: int = 3  # a worker that dies so often in a row is not started again
    max_batch_tokens: int = 16384  # padding included, of one forward pass of a reward model
    timeout_seconds: float = 30.0  # for one call of a function or endpoint
    # For one pass of a reward model, and all questions of a call of a judge under vLLM: a slow model is no failure.
    model_timeout_seconds: float = 300.0
    on_failure: str = "skip"
    normalize: str = "none"
    normalize_clip: float = 0.0  # bound of a normalised reward's size; 0 is none
    missing_eos_penalty: float = 0.0  # subtracted when the response was cut off
    overlong_buffer: int = 0  # DAPO's soft over-length penalty (2503.14476): width in tokens, 0 is off

    def __post_init__(self) -> None:
        check_choice("reward.kind", self.kind, (*KINDS, "sum"))
        check_choice("reward.on_failure", self.on_failure, ("skip", "stop"))
        check_choice("reward.normalize", self.normalize, NORMALIZATIONS)
        for key in ("workers", "max_batch_tokens"):
            check_range(f"reward.{key}", getattr(self, key), low=1)
        for key in ("timeout_seconds", "model_timeout_seconds"):
            check_range(f"reward.{key}", getattr(self, key), low=0, exclusive_low=True)
        for key in ("threads", "gpus", "max_restarts", "normalize_clip", "missing_eos_penalty", "overlong_buffer"):
            check_range(f"reward.{key}", getattr(self, key), low=0)
        check(
            self.normalize != "none" or not self.normalize_clip,
            f"reward.normalize_clip={self.normalize_clip:g} needs reward.normalize: running, batch or group.",
        )
        check(
            self.kind == "sum" or not self.parts,
            f"reward.parts needs reward.kind=sum, not reward.kind={self.kind}.",
        )
        check(self.kind != "sum" or self.parts, "reward.kind=sum needs reward.parts: NAME: {kind: ..., weight: ...}.")
        for name, part in self.sources.items():
            if self.kind != "sum":
                part.check("reward", KINDS)
                continue
            check(name not in PENALTIES, f"reward.parts.{name} has the name of a penalty; choose another name.")
            part.check(f"reward.parts.{name}", (*KINDS, "length"))

    @property
    def sources(self) -> dict[str, RewardPart]:
        """The parts of the reward by name; one called ``score`` unless ``kind=sum``."""
        if self.kind == "sum":
            return {str(name): _part(str(name), raw) for name, raw in self.parts.items()}
        return {"score": RewardPart(self.kind, 1.0, self.target, self.model, self.judge, self.http)}

    def key(self, name: str) -> str:
        """Where a part's settings stand, for messages."""
        return f"reward.parts.{name}" if self.kind == "sum" else "reward"


def _part(name: str, raw: Any) -> RewardPart:
    """OmegaConf has no frozen dataclasses as values of a dictionary, so parts are typed here."""
    key = f"reward.parts.{name}"
    if not isinstance(raw, Mapping):
        allowed = ", ".join(f.name for f in fields(RewardPart))
        raise ConfigError(f"{key}={raw} is of the wrong kind; allowed: settings of its own, out of {allowed}.")
    try:
        return overlay(RewardPart(), raw, key)
    except ConfigError as error:
        raise ConfigError(str(error).replace("reward.model", f"{key}.model")) from error


@dataclass(frozen=True)
class FusionConfig:
    """When a rollout may be scored: with its ``batch`` or ``group``, at its end (``rollout``), or at its end with
    all but its last tokens read before, by the reward models that can and the reference's workers (``chunk``)."""

    granularity: str = "rollout"
    max_batch: int = 64  # rollouts in one scoring call
    max_wait_ms: float = 2.0
    chunk_tokens: int = 64  # sampled tokens after which a sequence is sent on; granularity=chunk
    cache_tokens: int = 32768  # of the sequences that one such model holds in its KV cache; granularity=chunk

    @property
    def reads_ahead(self) -> bool:
        """Whether rollouts are read before their end."""
        return self.granularity == "chunk"

    def __post_init__(self) -> None:
        check_choice("fusion.granularity", self.granularity, GRANULARITIES)
        check_range("fusion.max_batch", self.max_batch, low=1)
        check_range("fusion.max_wait_ms", self.max_wait_ms, low=0)
        check_range("fusion.chunk_tokens", self.chunk_tokens, low=1)
        check(
            self.cache_tokens >= self.chunk_tokens,
            f"fusion.cache_tokens={self.cache_tokens} does not hold one chunk of fusion.chunk_tokens="
            f"{self.chunk_tokens}; allowed: at least as many.",
        )
