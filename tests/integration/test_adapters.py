"""Runs on a real Ray with environments and tools of other packages."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import asyncrlhf
from asyncrlhf.records.read.verify import verify
from tests.calling_model import call_text, calling_model
from tests.environment_servers import needs, serving
from tests.ray_run import part_processes, wait_until

pytestmark = pytest.mark.more
ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"logging": "quiet", "runtime": "ray", "steps": 20, "batch_size": 8, "num_generations": 4}
SETTINGS = {
    "task.heldout_size": 2, "generator.slots": 16, "generator.max_completion_length": 1500, "generator.threads": 0,
    "task.max_prompt_length": 2048, "episode.max_turns": 4, "episode.max_turn_tokens": 1, "episode.workers": 2,
}  # fmt: skip
WORDS = {
    "textarena": [f"[{number}]" + " " * more for number in range(1, 21) for more in range(15)],
    "openenv": [str(number) + " " * more for number in range(10) for more in range(1, 30)],
    "mcp": [call_text("add", json.dumps({"a": a, "b": b})) for a in range(15) for b in range(15)],
}


@pytest.mark.in_turn
@pytest.mark.thorough_but("openenv")
@pytest.mark.parametrize("kind", WORDS)
def test_it_trains(kind: str, tmp_path: Path, ray_local: Any) -> None:
    model = calling_model(tmp_path / "model", WORDS[kind])
    server: Any = nullcontext(("", None))
    if kind == "openenv":
        needs("openenv")
        server = serving("openenv_server.py", path="/words/schema")
    with server as (url, _):
        given: dict[str, Any] = {
            "textarena": {"environment_factory": "textarena:GuessTheNumber-v0"},
            "openenv": {"environment_factory": f"openenv:{url}/words"},
            "mcp": {
                "tools": [f"mcp:{sys.executable} {ROOT}/tests/mcp_server.py"],
                "dataset": [{"prompt": [{"role": "user", "content": f"Add to {n}."}]} for n in range(40)],
                "reward": "tests.trl_agents:calls",
            },
        }[kind]
        run = asyncrlhf.train(model, **given, **SMALL, overrides={**SETTINGS, "run_dir": tmp_path / "run"})
    ledger = run.summary["ledger"]
    assert run.summary["exit_reason"] == "done" and ledger["trained"] == 160 and not any(ledger["failed"].values())
    assert verify(run.path) == []
    rows = run.rollouts[run.rollouts.state == "trained"]
    assert rows.reward.nunique() > 1 and (rows.groupby("group_id").prompt.nunique() == 1).all()
    wait_until(lambda: not part_processes(), "the end of every actor's process")
