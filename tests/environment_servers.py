"""Starts servers of environments in processes of their own, with packages that `make install` keeps apart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from tests.ray_run import wait_until

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(sys.prefix) / "environments"  # of requirements/environments.txt


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def needs(package: str) -> None:
    if not (FOLDER / package).is_dir():
        pytest.skip(f"{package} is not installed; `make install` does (requirements/environments.txt)")


@contextmanager
def serving(
    script: str, *arguments: str, path: str, with_folder: bool = True
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of ``tests/SCRIPT``, called with these arguments and a port, once it answers at ``path``."""
    port = free_port()
    environment = {**os.environ, **({"PYTHONPATH": str(FOLDER)} if with_folder else {})}
    command = [sys.executable, str(ROOT / "tests" / script), *arguments, str(port)]
    process = subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, f"{script} has ended"
        try:
            return requests.get(url + path, timeout=5).status_code < 500
        except requests.ConnectionError:
            return False

    try:
        wait_until(answers, f"an answer of {script}", 90.0)
        yield url, process
    finally:
        process.kill()
        process.wait()
