"""Settings of episodes: rollouts of several turns with tools or an environment (``episode.*``)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import MONTH, check, check_settings, setting


@dataclass(frozen=True)
class EpisodeConfig:
    """With an environment or tools a rollout is an episode of several turns; without them it is one answer."""

    environment: str = setting(
        "",
        "The environment of each rollout: package.module:name of a class, ours or one for TRL's "
        "environment_factory, or of a dictionary of them, from which the row's column environment chooses; or "
        "textarena:GAME, or openenv:URL of a server.",
        common=True,
    )
    tools: list[str] = setting(
        [],
        "Functions that the model may call: calculator, or package.module:function, with type hints and docstring; or "
        "mcp:COMMAND or mcp:URL, for all tools of an MCP server.",
    )
    workers: int = setting(1, "Processes that run environments and tools; each runs many episodes.", low=1, high=10**4)
    concurrency: int = setting(
        0, "Episodes under way at a time, in all; 0: what staleness bound and buffer admit.", low=0, high=10**6
    )
    max_turns: int = setting(8, "Turns of an episode; after so many it ends, truncated.", low=1, high=10**5)
    max_turn_tokens: int = setting(
        0, "Tokens sampled in one turn; 0: what generator.max_completion_length leaves for the episode.", low=0
    )
    max_observation_length: int = setting(
        4096, "Characters of one observation or tool's result; the rest is cut off.", low=1, high=10**7
    )
    timeout_seconds: float = setting(
        60.0, "Seconds for one call of a tool or environment.", low=0, high=MONTH, exclusive_low=True
    )
    episode_seconds: float = setting(
        3600.0, "Seconds for a whole episode, after which it ends, truncated.", low=0, high=MONTH, exclusive_low=True
    )
    on_tool_error: str = setting(
        "tell",
        "After a call that is malformed, unknown, raises or is late: tell the model in words, or end the episode.",
        choices=("tell", "end"),
    )
    special_in_observed: str = setting(
        "escape",
        "Special tokens' texts in an observation: read as plain text (escape), or a failed call (refuse).",
        choices=("escape", "refuse"),
    )

    def __post_init__(self) -> None:
        check_settings("episode", self)
        for target in [*self.tools, *([self.environment] if self.environment else [])]:
            check(
                target in BUILT_IN or ":" in target,
                f"episode: {target} is not known; allowed: {', '.join(BUILT_IN)} and package.module:name.",
            )

    @property
    def code(self) -> list[tuple[str, str]]:
        """The settings that name code of the user, with what they name."""
        given = [("episode.environment", self.environment), *(("episode.tools", tool) for tool in self.tools)]
        return [(key, target) for key, target in given if target.partition(":")[0] not in OF_OTHERS]

    @property
    def used(self) -> bool:
        """Whether rollouts are episodes."""
        return bool(self.environment or self.tools)


BUILT_IN = ("calculator",)
OF_OTHERS = ("textarena", "openenv", "mcp")  # prefixes of other packages' environments and tools
