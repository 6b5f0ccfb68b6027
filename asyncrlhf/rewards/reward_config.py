"""Settings of rewards (their sources, reward models, judges and endpoints among them) and of how scoring is fused with
generation: ``reward.*`` and ``fusion.*``."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_choice, check_range, overlay

DTYPES = ("float32", "bfloat16", "float16")
TEMPLATE_FIELDS = ("prompt", "response", "answer")
TEMPLATE = """Rate how well the response answers the prompt, from 0 (useless) to 10 (perfect).

Prompt:
{prompt}

Response:
{response}

Explain briefly, then end with one line of the form "Score: NUMBER"."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A checkpoint for ``AutoModelForSequenceClassification`` with one label.

    ``inputs``: ``ids`` hands the policy's token ids on; ``text`` tokenises prompt and response with the checkpoint's
    own tokenizer, through its chat template where ``chat_template`` is on; ``auto`` takes the ids where both tokenizers
    are the same. ``max_length=0`` is the model's context. A longer rollout fails: a cut one would get another's score.
    """

    path: str = ""
    dtype: str = "float32"
    trust_remote_code: bool = False
    max_length: int = 0
    inputs: str = "auto"
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_choice("reward.model.dtype", self.dtype, DTYPES)
        check_choice("reward.model.inputs", self.inputs, ("auto", "ids", "text"))
        check_range("reward.model.max_length", self.max_length, low=0)
        check(
            not (self.chat_template and self.inputs == "ids"),
            "reward.model.chat_template=true needs the text; allowed: reward.model.inputs=auto or text.",
        )


@dataclass(frozen=True)
class JudgeConfig:
    """A generative model that is asked for a score: under vLLM in the worker, or behind an OpenAI-compatible server.

    ``engine=http`` asks ``http.url`` (up to and with ``/v1``). ``template`` has the fields ``{prompt}``, ``{response}``
    and ``{answer}``. The last match of ``pattern`` in the judge's text is the score, its one group a number; a text
    without one, or with a number outside ``low`` to ``high``, is a failed rollout.
    """

    engine: str = "vllm"
    model: str = ""
    template: str = TEMPLATE
    pattern: str = r"(?i)score:\s*([-+]?\d+(?:\.\d+)?)"
    low: float = 0.0
    high: float = 10.0
    max_tokens: int = 256
    temperature: float = 0.0
    chat_template: bool = True  # engine=vllm: put the question through the model's chat template
    max_length: int = 0  # engine=vllm: tokens of question and answer; 0 is the model's context
    dtype: str = "auto"  # engine=vllm
    tensor_parallel_size: int = 1  # engine=vllm
    kv_cache_gb: float = 0.0  # engine=vllm; 0 is vLLM's choice on GPUs, and 1 GiB on a CPU
    concurrency: int = 8  # engine=http: questions asked at once

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``; for a judge that is in use."""
        check_choice(f"{key}.engine", self.engine, ("vllm", "http"))
        check(self.model, f"{key}.model is empty; give a checkpoint (engine=vllm) or a model's name (engine=http).")
        check_choice(f"{key}.dtype", self.dtype, ("auto", *DTYPES))
        for name in ("max_tokens", "tensor_parallel_size", "concurrency"):
            check_range(f"{key}.{name}", getattr(self, name), low=1)
        for name in ("temperature", "max_length", "kv_cache_gb"):
            check_range(f"{key}.{name}", getattr(self, name), low=0)
        for name in ("low", "high"):
            check_range(f"{key}.{name}", getattr(self, name))
        check(self.low < self.high, f"{key}.low={self.low:g} is not below {key}.high={self.high:g}.")
        self._check_texts(key)

    def _check_texts(self, key: str) -> None:
        try:
            named = {name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None}
            groups = re.compile(self.pattern).groups
        except ValueError as error:
            raise ConfigError(
                f"{key}.template has a brace without its partner ({error}); write {{{{ for {{."
            ) from error
        except re.error as error:
            raise ConfigError(f"{key}.pattern is not a regular expression: {error}.") from error
        strange = sorted(named - set(TEMPLATE_FIELDS))
        allowed = ", ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
        check(not strange, f"{key}.template names {strange}; allowed: {allowed}.")
        check("response" in named, f"{key}.template has no {{response}}, so every response would be judged alike.")
        check(groups == 1, f"{key}.pattern has {groups} groups; allowed: one, around the number.")


@dataclass(frozen=True)
class HttpConfig:
    """A remote service and the patience with it.

    A call that meets no answer, a time-out, a 408, a 429 or a 5xx is tried again up to ``retries`` times, after
    ``backoff_seconds``, then twice that, and so on (or after what ``Retry-After`` asks for, within
    ``reward.timeout_seconds``). After ``breaker_failures`` failed calls in a row the service is not asked for
    ``breaker_seconds``; then one call tries it. ``token_env`` names an environment variable of the worker that holds a
    bearer token.
    """

    url: str = ""
    retries: int = 3
    backoff_seconds: float = 0.5
    breaker_failures: int = 5
    breaker_seconds: float = 30.0
    token_env: str = ""

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``; for a service that is in use."""
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            known = False
        check(
            known, f"{key}.url={self.url} is no address; allowed: one of http or https, such as http://HOST:PORT/PATH."
        )
        check_range(f"{key}.retries", self.retries, low=0)
        check_range(f"{key}.backoff_seconds", self.backoff_seconds, low=0)
        check_range(f"{key}.breaker_failures", self.breaker_failures, low=1)
        check_range(f"{key}.breaker_seconds", self.breaker_seconds, low=0)


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
    names, or those of ``reward_funcs``; ``model``, a sequence-classification checkpoint; ``judge``, a generative model
    that is asked for a score; ``http``, a remote endpoint; ``sum``, the weighted sum of ``parts``, each a name with
    ``kind``, ``weight`` and what that kind reads. ``on_failure=skip``: a rollout without a score fails and the run goes
    on; ``stop``: the first one ends the run. ``normalize`` changes what the learner trains on; records and metrics keep
    the reward as scored.
    """

    kind: str = "task"
    target: str = ""
    reward_funcs: list[str] = field(default_factory=list)  # kind=python: several functions, whose weighted sum it is
    reward_weights: list[float] = field(default_factory=list)  # of reward_funcs, in their order; empty: 1 each
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
        self._check_functions()
        check(self.kind != "sum" or self.parts, "reward.kind=sum needs reward.parts: NAME: {kind: ..., weight: ...}.")
        for name, part in self.sources.items():
            if self.kind != "sum":
                part.check("reward", KINDS)
                continue
            check(name not in PENALTIES, f"reward.parts.{name} has the name of a penalty; choose another name.")
            part.check(f"reward.parts.{name}", (*KINDS, "length"))

    def _check_functions(self) -> None:
        named, weights = self.reward_funcs, self.reward_weights
        check(
            self.kind == "python" or not named,
            f"reward.reward_funcs needs reward.kind=python, not reward.kind={self.kind}.",
        )
        check(not (named and self.target), "reward.target and reward.reward_funcs both name functions; keep one.")
        check(
            not weights or len(weights) == len(named),
            f"reward.reward_weights has {len(weights)} weights for the {len(named)} functions of reward.reward_funcs.",
        )
        for target in named:
            check(":" in target, f"reward.reward_funcs={target} is not of the form package.module:function.")
        twice = sorted({target for target in named if named.count(target) > 1})
        check(not twice, f"reward.reward_funcs names {', '.join(twice)} twice.")

    @property
    def sources(self) -> dict[str, RewardPart]:
        """The parts of the reward by name: those of ``kind=sum``, the functions of ``reward_funcs``, or one ``score``.

        A function goes by its own name, and by its whole target where another has the same name.
        """
        if self.reward_funcs:
            short = [target.rpartition(":")[2] for target in self.reward_funcs]
            names = [
                whole if short.count(name) > 1 or name in PENALTIES else name
                for name, whole in zip(short, self.reward_funcs, strict=True)
            ]
            weights = [float(w) for w in self.reward_weights] or [1.0] * len(names)
            given = zip(names, weights, self.reward_funcs, strict=True)
            return {name: RewardPart("python", weight, target=target) for name, weight, target in given}
        if self.kind == "sum":
            return {str(name): _part(str(name), raw) for name, raw in self.parts.items()}
        return {"score": RewardPart(self.kind, 1.0, self.target, self.model, self.judge, self.http)}

    def key(self, name: str) -> str:
        """Where a part's settings stand, for messages."""
        if self.reward_funcs:
            return f"reward.reward_funcs={self.sources[name].target}"
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
