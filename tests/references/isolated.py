"""Other people's implementations in a process of their own, so that importing them changes nothing here.

They patch torch, set environment variables and a start method, and torchrl is a plug-in that vLLM would load. So
`make install` puts them into a folder that only this process has on its path: ``references`` in the environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
FOLDER = Path(sys.prefix) / "references"
PINS = {
    name.lower(): version
    for file in ("cpu.txt", "references.txt")
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", (REQUIREMENTS / file).read_text(), re.MULTILINE)
}


def named(package: str, case: str) -> str:
    """A test's id: which version of which package says what is right."""
    return f"{package}-{PINS[package]}-{case}"


def require(package: str) -> None:
    """Skips where ``package`` is not installed; another version than the pinned one is a failure."""
    path = [str(FOLDER), *sys.path]
    found = next((d.version for d in importlib.metadata.distributions(name=package, path=path)), None)
    if found is None:
        pytest.skip(f"{package} {PINS[package]} is not installed; `make install` does (requirements/references.txt)")
    assert found == PINS[package], f"the tests compare with {package} {PINS[package]}; {found} is installed"


def _enter(folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("LOCAL_RANK", None)  # DeepSpeed's, of a test before: accelerate would look for the other ranks
    sys.path.append(folder)
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)


def _run(module: str, function: str, arguments: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(f"tests.references.peers.{module}"), function)(**arguments)


class Peers:
    """Calls functions of ``tests/references/peers`` in the process that has the references."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, module: str, function: str, **arguments: Any) -> Any:
        """Arguments and results are NumPy arrays and plain values."""
        return self._pool.submit(_run, module, function, arguments).result(timeout=240)


@contextmanager
def peers() -> Iterator[Peers]:
    """The process starts with the first call."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_enter, initargs=(str(FOLDER),)) as pool:
        yield Peers(pool)
