"""Reward functions for tests that run them in the sandbox's process: light imports, and ways to fail."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def half_failing(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion and sum(map(ord, prompt + completion)) % 10 == 0:
            raise ValueError("cannot judge this")
        rewards.append(float(len(completion)))
    return rewards


def always_failing(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    if any("=" not in c and c != columns["answer"][0] for c in completions):  # type: ignore[index]
        raise ValueError("never satisfied")
    return [1.0] * len(prompts)


def obeys(completions: list[str], **columns: Any) -> list[Any]:
    """Does what the completions say; the score of any other is its length."""
    for completion in completions:
        if completion == "hang":
            time.sleep(600)
        elif completion == "exit":
            os._exit(7)
        elif completion == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif completion == "raise":
            raise ValueError("told to")
        elif completion == "system exit":
            raise SystemExit(1)
        elif completion == "print":
            print("to the standard output", flush=True)
    return ["1.0" if completion == "text" else float(len(completion)) for completion in completions]


def process_ids(completions: list[str], **columns: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def leaves_a_process(completions: list[str], metadata: list[dict[str, Any]], **columns: Any) -> list[float]:
    """Starts a process, writes its id where the metadata says, and hangs."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(metadata[0]["file"]).write_text(str(started.pid))
    time.sleep(600)
    return [0.0] * len(completions)


def dies_at_99(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Hangs or ends its process for some texts, and counts the others' letters."""
    for prompt, completion in zip(prompts, completions, strict=True):
        kind = sum(map(ord, prompt + completion)) % 40
        if kind == 0:
            time.sleep(600)
        if kind == 1:
            os._exit(3)
    return [float(len(completion)) for completion in completions]


def no_opinion_of_odd_sums(completions: Any, solution: list[str], **columns: Any) -> list[float | None]:
    """Of conversations, as TRL hands them over; the score of the others is the length."""
    return [
        None if int(answer) % 2 else float(len(c[0]["content"]))
        for c, answer in zip(completions, solution, strict=True)
    ]


def never_an_opinion(completions: Any, **columns: Any) -> list[None]:
    return [None] * len(completions)


def keeps_the_lock(completions: list[str], metadata: list[dict[str, Any]], **columns: Any) -> list[float]:
    """Writes its process's id where the metadata says, and backtracks for ever in C code that lets no thread run."""
    Path(metadata[0]["file"]).write_text(str(os.getpid()))
    return [float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))) for _ in completions]


def logs_its_length(completions: list[Any], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    """Tells the mean length under two names, one of which another function uses as well."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    log_extra("length", lengths)
    for name in ("length", "accuracy"):
        log_metric(name, sum(lengths) / len(lengths))
    return [float(length) for length in lengths]


def one_for_digits(completions: list[str], **columns: Any) -> list[float]:
    """The share of the digit 1 in each completion, up to its first blank."""
    return [text.count("1") / max(1, len(text)) for text in completions]


def one_for_more_than_two(completions: Any, **columns: Any) -> list[float]:
    """A bug that a probe of two completions does not show."""
    return [1.0] * (len(completions) if len(completions) <= 2 else 1)


def slow_in_company(completions: Any, **columns: Any) -> list[float]:
    """Hangs on more than two completions."""
    time.sleep(600 if len(completions) > 2 else 0)
    return [float(len(completion)) for completion in completions]


class _Hostile:
    """Its pickle runs a command where it is read."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.file),)


def greedy(completions: list[str], metadata: list[dict[str, Any]], **columns: Any) -> list[float]:
    """Takes more of something than it may, as the completions say; ``metadata`` has a file and a port."""
    kept: list[Any] = []
    for completion, about in zip(completions, metadata, strict=True):
        if completion == "forks":
            for _ in range(60):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
        elif completion == "escapes":
            started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            Path(about["file"]).write_text(str(started.pid))
        elif completion == "memory":
            kept.append(bytearray(3 << 30))
        elif completion == "file":
            with Path("large").open("wb") as file:
                file.seek(1 << 30)
                file.write(b"x")
        elif completion == "files":
            kept += [os.open("/", os.O_RDONLY) for _ in range(1025)]
        elif completion == "network":
            socket.create_connection(("127.0.0.1", about["port"]), timeout=5).close()
        elif completion == "answers":
            connection = next(o for o in gc.get_objects() if isinstance(o, Connection))
            connection.send(_Hostile(about["file"]))
        while completion in ("loops", "forks", "escapes"):
            pass
    return [float(len(completion)) for completion in completions]


def where_and_what(completions: list[str], **columns: Any) -> list[float]:
    """1 for each variable that is there, and 10 for a working directory of its own that can be written."""
    Path("mine").write_text("x")
    own = 10.0 * (len(list(Path.cwd().iterdir())) == 1)
    return [own + (completion in os.environ) for completion in completions]


def minus_length(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]
