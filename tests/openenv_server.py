"""An OpenEnv server of the real package, ``python openenv_server.py PORT``, with environments at /words, /fields and
/tools. It has packages of its own, in a folder that only this process has on its path."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Move(Action):
    step: int
    back: bool = False


class Heard(Observation):
    text: str = ""


class Place(Observation):
    place: int = 0
    goal: int = 0


class Base(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    @property
    def state(self) -> State:
        return self._state


class Words(Base):
    """The model is to say the secret, which the seed makes; other words cost, and some are too much."""

    def reset(self, seed: int | None = None, hint: str = "", **_: Any) -> Heard:
        self.secret = str((seed or 0) % 10)
        return Heard(text=f"Say {self.secret}{hint}.")

    def step(self, action: Say, **_: Any) -> Heard:
        if action.message == "crash":
            raise ValueError("no such word")
        if action.message == "die":
            os._exit(3)
        if action.message == "sleep":
            time.sleep(30)
        right = action.message.strip() == self.secret
        return Heard(text=f"heard {action.message}", reward=1.0 if right else -0.125, done=right)


class Fields(Base):
    def reset(self, seed: int | None = None, **_: Any) -> Place:
        self.place, self.goal = 0, (seed or 0) % 5 + 1
        return Place(place=0, goal=self.goal)

    def step(self, action: Move, **_: Any) -> Place:
        self.place += -action.step if action.back else action.step
        done = self.place == self.goal
        return Place(place=self.place, goal=self.goal, done=done, reward=float(done))


class Tools(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        return Observation(metadata={"error": "only tools"})

    @property
    def state(self) -> State:
        return self._state


KINDS = {
    "words": (Words, Say, Heard),
    "fields": (Fields, Move, Place),
    "tools": (Tools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()
    for name, parts in KINDS.items():
        app.mount(f"/{name}", create_fastapi_app(*parts, max_concurrent_envs=64))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
