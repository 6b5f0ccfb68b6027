"""The page of episodes as its reader follows it: its files are written as they stand, and its commands run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrlhf.records.write.recorder import read_metrics
from tests.test_commands import FILE, ROOT, commands, furnish

PAGE = ROOT / "docs" / "episodes.md"
COMMANDS = commands(PAGE)
SHORT = "steps=1 batch_size=8 task.heldout_size=2 logging.wandb=disabled logging.progress=none run_dir=run"
RAY = "ray.object_store_mb=128"


def test_the_page_shows_files_and_commands() -> None:
    assert [name for name, _ in FILE.findall(PAGE.read_text())] == ["my_tools.py", "my_game.py", "my_agent.py"]
    assert len(COMMANDS) == 4 and PAGE.read_text().count("```python") == 3


@pytest.mark.parametrize("command", COMMANDS, ids=["tools", "game", "process", "function"])
@pytest.mark.more_but("tools", "game", "process")
def test_a_command_of_the_page_trains(command: str, tmp_path: Path) -> None:
    furnish(tmp_path / "page", PAGE)
    agent = "episode.agent" in command
    words = shlex.split(f"{command} {SHORT} {RAY if agent else 'runtime=local'}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path / "page", capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (row,) = read_metrics(tmp_path / "page" / "run" / "metrics.jsonl")
    assert row["turns_mean"] >= 1
