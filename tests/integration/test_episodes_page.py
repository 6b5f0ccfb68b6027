"""The page of episodes as its reader follows it: its files are written as they stand, and its commands run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.records.write.recorder import read_metrics
from tests.test_commands import FILE, ROOT, commands, furnish

PAGE = ROOT / "docs" / "episodes.md"
COMMANDS = commands(PAGE)
SHORT = "steps=1 batch_size=8 task.heldout_size=2 logging.wandb=disabled logging.progress=none run_dir=run"


def test_the_page_shows_files_and_commands() -> None:
    assert [name for name, _ in FILE.findall(PAGE.read_text())] == ["my_tools.py", "my_game.py", "my_agent.py"]
    assert len(COMMANDS) == 4 and PAGE.read_text().count("```python") == 3


@pytest.mark.parametrize("command", COMMANDS, ids=["tools", "game", "process", "function"])
@pytest.mark.more_but("tools", "game")
@pytest.mark.thorough_but("tools", "game")
def test_a_command_of_the_page_trains(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents in a process of their own, for they need Ray, the others in this one."""
    furnish(tmp_path / "page", PAGE)
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setattr(sys, "path", list(sys.path))
    if "episode.agent" not in command:
        assert main(shlex.split(f"{command} {SHORT} runtime=local")[1:]) == 0
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(f"{command} {SHORT} ray.object_store_mb=128")],
            capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (row,) = read_metrics(tmp_path / "page" / "run" / "metrics.jsonl")
    assert row["turns_mean"] >= 1
