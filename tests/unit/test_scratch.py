"""Folders that go with the process that made them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrlhf.scratch import Scratch

OWNER = "from asyncrlhf.scratch import Scratch; s = Scratch('mine-'); print(s.path, flush=True); input()"


def test_the_folder_of_a_killed_process_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, variables = [sys.executable, "-c", OWNER], {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    killed, living = (subprocess.Popen(command, env=variables, text=True, **pipes) for _ in range(2))  # type: ignore[call-overload]
    folders = [Path(process.stdout.readline().strip()) for process in (killed, living)]
    killed.kill()
    killed.wait()
    own = Scratch("mine-")
    assert [folder.exists() for folder in (*folders, own.path)] == [False, True, True]
    with own.of_processes():
        shown = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True
        )
    assert shown.stdout.decode().strip() == str(own.path) != os.environ.get("TMPDIR")
    own.close()
    own.close()
    living.communicate("\n")
    assert list(tmp_path.iterdir()) == folders[1:], "an owner that ends without closing leaves it to the next"
    Scratch("mine-").close()
    assert not any(tmp_path.iterdir())
