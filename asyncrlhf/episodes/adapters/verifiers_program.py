"""The agent of ``episode.agent_command`` that plays a task of verifiers; for an environment that has verifiers.

    VENV/bin/python .../verifiers_program.py TASKSET ['{"agent": {"max_turns": 4}}']

verifiers (0.4) asks for versions of openai and mcp that vLLM refuses, so that it has an environment of its own; this
file imports nothing of this package. The second argument is an environment's config of verifiers, in JSON. The row's
column ``index``, or else ``seed``, chooses the task. The last line of the output is the episode's reward.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

MOST_TASKS = 10_000  # of a taskset without an end
LOCAL = {
    "harness": {"id": "null"},
    "runtime": {"type": "subprocess"},
}  # a chat with tools, in a process of this machine


def with_defaults(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """``defaults`` with all that is ``given``, at any depth."""
    merged = dict(defaults)
    for name, value in given.items():
        own = merged.get(name)
        merged[name] = with_defaults(value, own) if isinstance(own, dict) and isinstance(value, dict) else value
    return merged


async def play(taskset: str, given: dict[str, Any], row: dict[str, Any]) -> float:
    """The reward of one episode, of all its traces together. Raises RuntimeError with the episode's own error."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = resolve_env_config(with_defaults(given, {"taskset": {"id": taskset}, "agent": LOCAL}))
    environment = load_environment(config)
    number = int(row.get("index", row.get("seed", 0)))
    if environment.taskset.bounded:
        tasks = list(environment.taskset)
        task = tasks[number % len(tasks)]
    else:
        task = next(itertools.islice(environment.taskset, number % MOST_TASKS, None))
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    return sum(trace.reward for trace in episode.traces)


def main() -> None:
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    row = json.loads(os.environ.get("ASYNCRLHF_ROW", "{}"))
    try:
        reward = asyncio.run(play(sys.argv[1], given, row))
    except RuntimeError as error:
        sys.exit(str(error))
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
