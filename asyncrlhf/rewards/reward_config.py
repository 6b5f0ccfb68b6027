"""Settings of rewards (their sources, reward models, judges and endpoints among them) and of how scoring is fused with
generation: ``reward.*`` and ``fusion.*``."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import MONTH, check, check_choice, check_range, check_settings, group, overlay, setting

DTYPES = ("float32", "bfloat16", "float16")
JUDGES = ("vllm", "http")
TEMPLATE_FIELDS = ("prompt", "response", "answer")
TEMPLATE = """Rate how well the response answers the prompt, from 0 (useless) to 10 (perfect).

Prompt:
{prompt}

Response:
{response}

Explain briefly, then end with one line of the form "Score: NUMBER"."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A checkpoint for ``AutoModelForSequenceClassification`` with one label."""

    path: str = setting("", "A sequence-classification checkpoint with one label: a local folder or a hub name.")
    dtype: str = setting("float32", "Number format of its weights.", choices=DTYPES)
    trust_remote_code: bool = setting(False, "Allows the checkpoint to run its own Python code.")
    max_length: int = setting(
        0,
        "Longest prompt and response, in tokens; 0: the model's context. A longer rollout fails; it is not cut.",
        low=0,
    )
    inputs: str = setting(
        "auto",
        "Input: the policy's token ids (ids), the text with its own tokenizer (text), or ids if both tokenizers are "
        "equal (auto).",
        choices=("auto", "ids", "text"),
    )
    chat_template: bool = setting(False, "inputs=text: formats prompt and response with its chat template.")

    def __post_init__(self) -> None:
        check_settings("reward.model", self)
        check(
            not (self.chat_template and self.inputs == "ids"),
            "reward.model.chat_template=true needs the text; allowed: reward.model.inputs=auto or text.",
        )


@dataclass(frozen=True)
class JudgeConfig:
    """A generative model that scores rollouts: with vLLM in the worker, or behind an OpenAI-compatible server.

    A text without a match of ``pattern``, or with a number outside ``low`` to ``high``, is a failed rollout.
    """

    engine: str = setting("vllm", "Where it runs: vLLM in the worker, or the server of http.url.", choices=JUDGES)
    model: str = setting("", "A checkpoint (engine=vllm), or the model's name at the server (engine=http).")
    template: str = setting(TEMPLATE, "The question; its fields are {prompt}, {response} and {answer}.")
    pattern: str = setting(
        r"(?i)score:\s*([-+]?\d+(?:\.\d+)?)",
        "Regular expression whose last match in the judge's text is the score; its one group is a number.",
    )
    low: float = setting(0.0, "Lowest valid score; a rollout with a lower one fails.")
    high: float = setting(10.0, "Highest valid score; a rollout with a higher one fails.")
    max_tokens: int = setting(256, "Longest text of the judge, in tokens.", low=1)
    max_length: int = setting(
        0, "engine=vllm: longest question and answer, in tokens; 0 is the model's context.", low=0
    )

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``; only for a judge in use."""
        check_settings(key, self)
        check(self.model, f"{key}.model is empty; give a checkpoint (engine=vllm) or a model's name (engine=http).")
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
    """A remote service and its retries. A call without an answer, or with a timeout, a 408, a 429 or a 5xx, is
    repeated, within ``reward.timeout_seconds``."""

    url: str = setting("", "The service's address, http or https.")
    retries: int = setting(
        3, "Retries of a failed call, after half a second, then twice as long each time.", low=0, high=100
    )
    breaker_failures: int = setting(5, "Consecutive failed calls after which calls pause for 30 seconds.", low=1)
    token_env: str = setting("", "Environment variable of the worker that holds a bearer token.")

    def check(self, key: str) -> None:
        """Raise ConfigError, naming settings under ``key``; only for a service in use."""
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            known = False
        check(
            known,
            f"{key}.url={self.url} is not an address; allowed: one of http or https, such as http://HOST:PORT/PATH.",
        )
        check_settings(key, self)


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of the process of a reward function (kind=python). Each process that it starts has the same limits."""

    memory_gb: float = setting(
        64.0,
        "Address space of a process, in GiB, with libraries and reserved memory; 0: no limit.",
        low=0,
        high=1e6,
    )
    processes: int = setting(64, "Most processes that it may run at a time.", low=0)
    network: bool = setting(True, "Whether it may use the network; false needs a kernel that gives namespaces.")
    env: list[str] = setting([], "Environment variables with secrets that it may read, such as an API key.")

    def __post_init__(self) -> None:
        check_settings("reward.sandbox", self)


GRANULARITIES = ("batch", "group", "rollout", "chunk")
KINDS = ("task", "python", "model", "judge", "http", "environment")
NORMALIZATIONS = ("none", "running", "batch", "group")
# Annotation.parts uses these names for the penalties, so no user-defined part may have them.
PENALTIES = ("missing_eos", "overlong")


@dataclass(frozen=True)
class RewardPart:
    """One source of scores."""

    kind: str = setting("task", "As reward.kind, without sum; or length, the number of response tokens.")
    weight: float = setting(1.0, "Weight of the part's score in the sum.")
    target: str = setting("", "As reward.target.")
    model: RewardModelConfig = group(RewardModelConfig, "As reward.model.")
    judge: JudgeConfig = group(JudgeConfig, "As reward.judge.")
    http: HttpConfig = group(HttpConfig, "As reward.http.")

    def check(self, key: str, kinds: tuple[str, ...]) -> None:
        """Raise ConfigError, naming settings under ``key``, unless the settings of ``kind`` are given."""
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
    """Where rewards come from, and what happens if a score fails."""

    kind: str = setting(
        "task",
        "Where rewards come from: the task's own rule, the function that target names, a reward model, a generative "
        "judge, a remote endpoint, an episode's environment, or the weighted sum of parts.",
        choices=(*KINDS, "sum"),
        common=True,
    )
    target: str = setting(
        "",
        "kind=python: the function, package.module:function, called as f(prompts, completions, **columns).",
        common=True,
    )
    reward_funcs: list[str] = setting(
        [], "kind=python: several functions instead of target; the reward is their weighted sum."
    )
    reward_weights: list[float] = setting([], "Weights of reward_funcs, in their order; empty is 1 each.")
    model: RewardModelConfig = group(RewardModelConfig, "The reward model of kind=model.")
    judge: JudgeConfig = group(JudgeConfig, "The generative judge of kind=judge.")
    http: HttpConfig = group(HttpConfig, "The endpoint of kind=http, or the judge's server.")
    sandbox: SandboxConfig = group(SandboxConfig, "Resource limits of reward functions.")
    parts: dict[str, Any] = setting({}, "kind=sum: the sources by name.", entries=RewardPart)
    workers: int = setting(1, "Reward workers; all share one queue of finished rollouts.", low=1, high=10**4)
    threads: int = setting(0, "CPU threads of one worker's models; 0: torch's default.", low=0, high=1024)
    gpus: float = setting(0.0, "GPUs of one worker; 0 runs its models on the CPU.", low=0, high=1024)
    max_batch_tokens: int = setting(16384, "Tokens, padding included, of one forward pass of a reward model.", low=1)
    timeout_seconds: float = setting(
        30.0, "Seconds for one call of a function or endpoint.", low=0, high=MONTH, exclusive_low=True
    )
    model_timeout_seconds: float = setting(
        300.0,
        "Seconds for one pass of a reward model, or for all questions of a judge's call.",
        low=0,
        high=MONTH,
        exclusive_low=True,
    )
    normalize: str = setting(
        "none",
        "Normalisation of training rewards: none, by all so far (running), by the batch, or by the group; records "
        "keep the raw scores.",
        choices=NORMALIZATIONS,
    )
    normalize_clip: float = setting(0.0, "Largest absolute value of a normalised reward; 0: no limit.", low=0)
    missing_eos_penalty: float = setting(0.0, "Subtracted from the reward of a response that was cut off.", low=0)
    overlong_buffer: int = setting(
        0, "Width, in tokens, of DAPO's soft penalty before max_completion_length (2503.14476); 0 is off.", low=0
    )

    def __post_init__(self) -> None:
        check_settings("reward", self)
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

        A function's name is its own, or its whole target if another has the same name.
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
        """The key of a part's settings, for messages."""
        if self.reward_funcs:
            return f"reward.reward_funcs={self.sources[name].target}"
        return f"reward.parts.{name}" if self.kind == "sum" else "reward"


def _part(name: str, raw: Any) -> RewardPart:
    """OmegaConf has no frozen dataclasses as values of a dictionary, so parts are typed here."""
    key = f"reward.parts.{name}"
    try:
        return overlay(RewardPart(), raw, key)
    except ConfigError as error:
        raise ConfigError(str(error).replace("reward.model", f"{key}.model")) from error


@dataclass(frozen=True)
class FusionConfig:
    """How scoring is fused with generation."""

    granularity: str = setting(
        "rollout",
        "When a rollout is scored: with its batch or group, at its end (rollout), or at its end with all but the "
        "last tokens read ahead (chunk).",
        choices=GRANULARITIES,
    )
    max_batch: int = setting(64, "Rollouts of one scoring call.", low=1)
    max_wait_ms: float = setting(
        2.0, "Milliseconds that a finished rollout waits for others to share a call.", low=0, high=60_000
    )
    chunk_tokens: int = setting(64, "granularity=chunk: sampled tokens per chunk.", low=1)
    cache_tokens: int = setting(32768, "granularity=chunk: KV cache of each reading model, in tokens.")

    @property
    def reads_ahead(self) -> bool:
        """Whether rollouts are read before their end."""
        return self.granularity == "chunk"

    def __post_init__(self) -> None:
        check_settings("fusion", self)
        check(
            self.cache_tokens >= self.chunk_tokens,
            f"fusion.cache_tokens={self.cache_tokens} does not hold one chunk of fusion.chunk_tokens="
            f"{self.chunk_tokens}; allowed: at least as many.",
        )
