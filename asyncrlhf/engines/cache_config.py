"""``generator.cache``: which of a response's keys and values the hf engine keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_settings, overlay, setting

POLICIES = ("full", "window", "heavy_hitters", "separators", "chunk_sink")
ENDS = ("first", "last", "both")


@dataclass(frozen=True)
class CacheConfig:
    """Keys and values that stay, by layer and key-value head: always the prompt and the newest ``window`` tokens; of
    the others those that ``policy`` scores highest, up to the budget. Positions stay as they were.

    ``window``: the newest ones, which with the prompt in front is StreamingLLM (2309.17453). ``heavy_hitters``: those
    that got most attention so far (H2O, 2306.14048). ``separators``: punctuation and line ends first, then the newest
    (SepLLM, 2412.12094). ``chunk_sink``: the first token of each chunk, where chunks are blocks that attention forms.
    """

    policy: str = setting("full", "Which tokens stay; full: all.", choices=POLICIES)
    share: float = setting(
        0.25, "Most response tokens kept, as a share of generator.max_completion_length.",
        low=0, high=1, exclusive_low=True,
    )  # fmt: skip
    tokens: int | None = setting(None, "The same as a number of tokens; null: by share.", low=1, high=10**7)
    window: int = setting(16, "Newest tokens that always stay.", low=2, high=10**6)
    every: int = setting(8, "Tokens between two evictions.", low=1, high=10**6)
    keep: str = setting("first", "chunk_sink: the end of each chunk that stays.", choices=ENDS)
    compare_every: int = setting(
        16, "Of so many rollouts one is compared with the whole cache, if one version made it; 0: none.", low=0
    )

    def __post_init__(self) -> None:
        check_settings("generator.cache", self)

    @property
    def half(self) -> int:
        """Tokens on each side of a place at which a chunk may begin, whose attention decides."""
        return self.window // 2

    def budget(self, longest: int) -> int:
        """Most tokens of a response of at most ``longest`` that stay."""
        return self.tokens if self.tokens is not None else math.ceil(self.share * longest)


def read_cache(given: Any, longest: int) -> CacheConfig | None:
    """``generator.cache`` as written, a policy's name or a mapping with it; None: everything stays. Raises ConfigError
    where responses of ``longest`` tokens leave nothing to choose from."""
    whole = "generator.cache"
    if given == "full":  # at once: this is asked for each copy of the settings
        return None
    check(
        isinstance(given, str | Mapping),
        f"{whole}={given} is neither the name of a policy nor a mapping; allowed: {', '.join(POLICIES)}, or such as "
        "{policy:chunk_sink,share:0.25,window:16}.",
    )
    config = overlay(CacheConfig(), {"policy": given} if isinstance(given, str) else given, whole)
    if config.policy == "full":
        check(isinstance(given, str) or set(given) == {"policy"}, f"{whole}: policy=full has no further settings.")
        return None
    check(config.policy == "chunk_sink" or config.keep == "first", f"{whole}.keep is for policy=chunk_sink.")
    least = config.window + config.every + 1
    if config.budget(longest) < least:
        raise ConfigError(
            f"{whole} keeps {config.budget(longest)} of at most {longest} response tokens, but window={config.window}, "
            f"every={config.every} and one more need {least}; allowed: a larger share, longer "
            "responses, or a smaller window or every."
        )
    return config
