"""Settings of episodes: rollouts of several turns with tools or an environment (``episode.*``)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import MONTH, check, check_settings, setting


@dataclass(frozen=True)
class EpisodeConfig:
    """With an environment, tools or an agent a rollout is an episode of several turns; without, it is one answer."""

    environment: str = setting(
        "",
        "The environment of each rollout: package.module:name of a class, ours or one for TRL's "
        "environment_factory, or of a dictionary of them, from which the row's column environment chooses; or "
        "textarena:GAME, or openenv:URL of a server.",
        common=True,
    )
    tools: list[str] = setting(
        [],
        "Functions that the model may call: calculator, python (programs, in a sandbox), or package.module:function, "
        "with type hints and docstring; or mcp:COMMAND or mcp:URL, for all tools of an MCP server.",
    )
    agent: str = setting(
        "",
        "An agent that plays each episode by calls of an OpenAI-compatible endpoint: package.module:function of "
        "base_url, api_key and row, which may return the reward.",
    )
    agent_command: str = setting(
        "",
        "The same as a process for each episode, by OPENAI_BASE_URL, OPENAI_API_KEY and ASYNCRLHF_ROW in its "
        'environment; the last line of its output may be the reward, a number or {"reward": number}.',
    )
    agent_sampling: str = setting(
        "ignore",
        "Temperature and other sampling settings of an agent's call that are not the run's own: without effect "
        "(ignore), or an error for the agent (refuse).",
        choices=("ignore", "refuse"),
    )
    endpoint_host: str = setting(
        "127.0.0.1", "Address at which a worker's endpoint listens; 0.0.0.0: all, for agents on other machines."
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
        3600.0,
        "Seconds that the environment or agent takes in a whole episode, after which it ends, truncated; the time in "
        "which its turns are sampled does not count.",
        low=0,
        high=MONTH,
        exclusive_low=True,
    )
    on_tool_error: str = setting(
        "tell",
        "After a call that is malformed, unknown, raises or is late: tell the model in words, or end the episode.",
        choices=("tell", "end"),
    )
    history: str = setting(
        "keep",
        "What a turn sees of earlier ones: what was sampled (keep), or what the chat template and the agent make of it "
        "(fork), in further branches of the episode's row.",
        choices=("keep", "fork"),
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
        self._check_agent()

    def _check_agent(self) -> None:
        check(
            not (self.agent and self.agent_command),
            "episode.agent and episode.agent_command both play the episode; keep one.",
        )
        check(
            not self.agents or not (self.environment or self.tools),
            "episode.agent plays the episode itself, so that episode.environment and episode.tools have no effect; "
            "keep one.",
        )
        try:
            words = shlex.split(self.agent_command)
        except ValueError as error:
            raise ConfigError(f"episode.agent_command={self.agent_command} is no command line: {error}.") from error
        check(
            not self.agent_command or words,
            "episode.agent_command is blank; allowed: a command line such as python my_agent.py.",
        )

    @property
    def code(self) -> list[tuple[str, str]]:
        """The settings that name code of the user, with what they name."""
        given = [("episode.environment", self.environment), *(("episode.tools", tool) for tool in self.tools)]
        return [(key, target) for key, target in given if target.partition(":")[0] not in OF_OTHERS]

    @property
    def used(self) -> bool:
        """Whether rollouts are episodes."""
        return bool(self.environment or self.tools or self.agents)

    @property
    def agents(self) -> bool:
        """Whether episodes are played by agents that call an endpoint."""
        return bool(self.agent or self.agent_command)


BUILT_IN = ("calculator", "python")
OF_OTHERS = ("textarena", "openenv", "mcp")  # prefixes of other packages' environments and tools
