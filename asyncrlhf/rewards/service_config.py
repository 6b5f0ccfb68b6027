"""Settings of the services that score: reward models, generative judges, remote endpoints."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from urllib.parse import urlsplit

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_choice, check_range

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
